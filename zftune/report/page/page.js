"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = { displayModeBar: false, responsive: true, scrollZoom: false };
  // Under a finger a drag is meant for the page.
  const touched = matchMedia("(pointer: coarse)").matches;
  for (const [name, figure] of Object.entries(figures)) {
    const place = document.getElementById(name);
    const layout = { ...figure.layout, ...(touched ? { dragmode: false } : {}) };
    Plotly.newPlot(place, figure.data, layout, config).then(() => {
      place.dataset.drawn = "yes";
      new ResizeObserver(() => Plotly.Plots.resize(place)).observe(place);
    });
  }
})();
