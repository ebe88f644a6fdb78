// What a hostile page may try against a page on another port; each answers "nothing" or what it got.
async function attack(target, run, own) {
  const stop = `${target}/v1/runs/${run}/stop`;
  const body = (type) => ({ method: "POST", credentials: "include", headers: { "content-type": type }, body: "{}" });
  const read = async (url, options = {}) => {
    try {
      const answer = await fetch(url, { credentials: "include", ...options });
      const text = await answer.text();
      return answer.type === "opaque" && text === "" ? "nothing" : `${answer.status} ${text}`;
    } catch (error) {
      return "nothing";
    }
  };
  const asked = (method, url) =>
    new Promise((done) => {
      const request = new XMLHttpRequest();
      request.open(method, url);
      request.withCredentials = true;
      request.onload = () => done(`${request.status} ${request.responseText}`);
      request.onerror = () => done("nothing");
      request.send(method === "POST" ? "{}" : null);
    });
  const loaded = (tag, attribute, url, more = {}) =>
    new Promise((done) => {
      const element = Object.assign(document.createElement(tag), more);
      element.onload = () => done(tag === "iframe" ? framed(element) : `${tag} loaded`);
      element.onerror = () => done("nothing");
      element[attribute] = url;
      document.body.append(element);
    });
  const framed = (frame) => {
    try {
      return `frame ${frame.contentWindow.document.body.innerText}`; // one that was refused is an error page's
    } catch (error) {
      return "nothing";
    }
  };
  const posted = (url) =>
    new Promise((done) => {
      const frame = Object.assign(document.createElement("iframe"), { name: `f${Math.random()}` });
      const form = Object.assign(document.createElement("form"), { method: "POST", action: url, target: frame.name });
      document.body.append(frame, form);
      frame.onload = () => done(framed(frame));
      form.submit();
    });
  const opened = (url) =>
    new Promise((done) => {
      const socket = new WebSocket(url.replace("http:", "ws:"));
      socket.onopen = () => done("a socket");
      socket.onerror = () => done("nothing");
    });
  const streamed = (url) =>
    new Promise((done) => {
      const source = new EventSource(url, { withCredentials: true });
      source.onopen = source.onmessage = () => done("a stream");
      source.onerror = () => (source.close(), done("nothing"));
    });
  const imported = async (url) => {
    try {
      return `module ${Object.keys(await import(url))}`;
    } catch (error) {
      return "nothing";
    }
  };
  const tries = {
    fetch: read(`${target}/v1/runs`),
    "fetch of a page": read(`${target}/`),
    "fetch without CORS": read(`${target}/v1/runs`, { mode: "no-cors" }),
    "post of text": read(stop, { ...body("text/plain"), mode: "no-cors" }),
    "post of JSON": read(stop, body("application/json")),
    "put": read(stop, { ...body("application/json"), method: "PUT" }),
    "post by a redirect": read(`${own}/redirect?${encodeURIComponent(stop)}`, { ...body("text/plain"), mode: "no-cors" }),
    "XHR": asked("GET", `${target}/v1/runs`),
    "post by XHR": asked("POST", stop),
    beacon: (navigator.sendBeacon(stop, "{}"), Promise.resolve("nothing")),
    form: posted(stop),
    "form to stop the daemon": posted(`${target}/v1/stop`),
    "form for a link": posted(`${target}/v1/page`),
    image: loaded("img", "src", `${target}/favicon.ico`),
    "image of a command": loaded("img", "src", stop),
    script: loaded("script", "src", `${target}/page.js`),
    "script of data": loaded("script", "src", `${target}/v1/runs`),
    module: imported(`${target}/words.js`),
    style: loaded("link", "href", `${target}/page.css`, { rel: "stylesheet" }),
    frame: loaded("iframe", "src", `${target}/`),
    socket: opened(`${target}/v1/runs`),
    stream: streamed(`${target}/v1/runs`),
  };
  const found = {};
  for (const [name, outcome] of Object.entries(tries)) found[name] = await outcome;
  return found;
}
