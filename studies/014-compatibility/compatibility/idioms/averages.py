"""Averages of the weights: kept beside the training, swapped in for an evaluation, taught by."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from compatibility.idioms.script import HIDDEN, OUTPUTS, Net, Script, batch, batches, net


def by_name(script: Script) -> None:
    """An average of `named_parameters()`, as diffusion scripts keep it."""
    model = net()
    engine = script.engine(model)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    for x, y in batches():
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        with torch.no_grad():
            for name, p in engine.module.named_parameters():
                average[name].mul_(0.9).add_(p, alpha=0.1)
    script.read("average", average.values())


def of_state_dicts(script: Script) -> None:
    """Clones of `state_dict()`, averaged at the end, as for a report of the last checkpoints."""
    model = net()
    engine = script.engine(model)
    kept = []
    for number, (x, y) in enumerate(batches()):
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        if number >= 14:
            kept.append({name: value.clone() for name, value in engine.module.state_dict().items()})
    script.read("average", (sum(state[name] for state in kept) / len(kept) for name in kept[0]))


def swa(script: Script) -> None:
    """torch's `AveragedModel`, the mean of the steps since one."""
    model = net()
    average = AveragedModel(model)
    engine = script.engine(model)
    for number, (x, y) in enumerate(batches()):
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        if number >= 5:
            average.update_parameters(model)
    script.read("average", average.module.parameters())


def ema_of_torch(script: Script) -> None:
    """torch's `AveragedModel` as a moving average, by `torch._foreach_lerp_`."""
    model = net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    engine = script.engine(model)
    for x, y in batches():
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        average.update_parameters(engine.module)
        script.read("loss of the average", [F.mse_loss(average(x), y)])
    script.read("average", average.parameters())


class ModelEma(nn.Module):
    """As timm has it."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay

    def update(self, model: nn.Module) -> None:
        with torch.no_grad():
            for ours, theirs in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
                ours.copy_(self.decay * ours + (1.0 - self.decay) * theirs)


def ema_of_timm(script: Script) -> None:
    """A deep copy that is made of the wrapped model, in the midst of training, and follows its `state_dict()`."""
    model = net()
    engine = script.engine(model)
    ema = None
    for number, (x, y) in enumerate(batches()):
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        if number == 4:
            ema = ModelEma(engine.module, 0.8)
        elif ema is not None:
            ema.update(engine.module)
    assert ema is not None
    script.read("average", ema.module.parameters())


def in_a_thread(script: Script) -> None:
    """An average that another thread takes while the next forward and backward run."""
    model = net()
    engine = script.engine(model)
    average = [p.detach().clone() for p in model.parameters()]

    def update() -> None:
        with torch.no_grad():
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p, 0.1)

    with ThreadPoolExecutor(1) as pool:
        updating = pool.submit(update)
        for x, y in batches():
            engine.backward(F.mse_loss(engine(x), y))
            updating.result()
            engine.step()
            updating = pool.submit(update)
        updating.result()
    script.read("average", average)


def swapped_by_copies(script: Script) -> None:
    """Swapped in for an evaluation with `copy_`, and back: `ema.store()`, `ema.copy_to()`, `ema.restore()`."""
    model = net()
    engine = script.engine(model)
    parameters = list(model.parameters())
    shadow = [p.detach().clone() for p in parameters]
    for number, (x, y) in enumerate(batches()):
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        with torch.no_grad():
            for s, p in zip(shadow, parameters, strict=True):
                s.sub_((1 - 0.9) * (s - p))
        if number % 3 == 2:
            stored = [p.clone() for p in parameters]
            for s, p in zip(shadow, parameters, strict=True):
                p.data.copy_(s.data)
            with torch.no_grad():
                script.read("loss of the average", [F.mse_loss(engine(x), y)])
            for s, p in zip(stored, parameters, strict=True):
                p.data.copy_(s.data)


def swapped_by_data(script: Script) -> None:
    """Swapped in by exchange of `p.data`, and back, with a training that goes on."""
    model = net()
    engine = script.engine(model)
    shadow = [p.detach().clone() for p in model.parameters()]

    def swap() -> None:
        for number, p in enumerate(model.parameters()):
            p.data, shadow[number] = shadow[number], p.data

    for number, (x, y) in enumerate(batches()):
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        torch._foreach_lerp_(shadow, [p.data for p in model.parameters()], 0.2)
        if number % 5 == 4:
            swap()
            model.eval()
            with torch.no_grad():
                script.read("loss of the average", [F.mse_loss(engine(x), y)])
            model.train()
            swap()


def mean_teacher(script: Script) -> None:
    """A student that is to agree with the average of itself, on other inputs."""
    student = net()
    teacher = copy.deepcopy(student)
    teacher.requires_grad_(False)
    engine = script.engine(student)
    for number, (x, y) in enumerate(batches()):
        other, _ = batch(1000 + number)
        agree = F.mse_loss(engine(other), teacher(other + 0.1))
        engine.backward(F.mse_loss(engine(x), y) + 0.5 * agree)
        engine.step()
        for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
            t.data.mul_(0.9).add_(s.data, alpha=0.1)
    script.read("teacher", teacher.parameters())


def byol(script: Script) -> None:
    """Online network and predictor, beside a target network with a momentum that grows."""
    torch.manual_seed(3)
    online = nn.Sequential(Net(), nn.Linear(OUTPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS))
    target = copy.deepcopy(online[0])
    for p in target.parameters():
        p.requires_grad = False
    engine = script.engine(online)
    for number, (x, _) in enumerate(batches()):
        one, two = x + 0.1 * batch(2000 + number)[0], x - 0.1 * batch(3000 + number)[0]
        with torch.no_grad():
            goals = target(one), target(two)
        loss = 2 - F.cosine_similarity(engine(one), goals[1]).mean() - F.cosine_similarity(engine(two), goals[0]).mean()
        engine.backward(loss)
        engine.step()
        momentum = 1 - 0.1 * (1 - number / 20)
        for p, q in zip(target.parameters(), engine.module[0].parameters(), strict=True):
            p.data = momentum * p.data + (1 - momentum) * q.data
    script.read("target", target.parameters())


def dino(script: Script) -> None:
    """A teacher with a centre, whose weights follow `engine.module` in the loop of the students' crops."""
    student, teacher = net(), net()
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    engine = script.engine(student)
    centre = torch.zeros(1, OUTPUTS)
    for number, (x, _) in enumerate(batches()):
        crops = [x + 0.2 * batch(4000 + 10 * number + crop)[0] for crop in range(3)]
        with torch.no_grad():
            outputs = teacher(crops[0])
            goal = F.softmax((outputs - centre) / 0.3, dim=-1)
            centre = 0.9 * centre + 0.1 * outputs.mean(dim=0, keepdim=True)
        losses: list[Tensor] = [-(goal * F.log_softmax(engine(crop), dim=-1)).sum(-1).mean() for crop in crops[1:]]
        engine.backward(sum(losses) / len(losses))
        engine.step()
        with torch.no_grad():
            for q, k in zip(engine.module.parameters(), teacher.parameters(), strict=True):
                k.data.mul_(0.9).add_((1 - 0.9) * q.detach().data)
    script.read("teacher", teacher.parameters())


def dqn(script: Script) -> None:
    """A target network that is the policy of some steps ago: `load_state_dict(policy.state_dict())`."""
    policy, target = net(), net()
    engine = script.engine(policy)
    target.load_state_dict(policy.state_dict())
    for number, (x, reward) in enumerate(batches()):
        action = torch.arange(len(x)) % OUTPUTS
        with torch.no_grad():
            goal = reward[:, 0] + 0.9 * target(x.roll(1, 0)).max(1).values
        value = engine(x).gather(1, action[:, None])[:, 0]
        engine.backward(F.smooth_l1_loss(value, goal))
        engine.step()
        if number % 3 == 2:
            target.load_state_dict(policy.state_dict())
            script.read("target", target.parameters())


class MoCo(nn.Module):
    """A query encoder, a key encoder that follows it before each forward, and a queue of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder_q, self.encoder_k = Net(), Net()
        self.register_buffer("queue", F.normalize(torch.randn(OUTPUTS, 32), dim=0))
        self.pointer = 0
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data.copy_(q.data)
            k.requires_grad = False

    @torch.no_grad()
    def _momentum_update_key_encoder(self) -> None:
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data = k.data * 0.9 + q.data * (1.0 - 0.9)

    def forward(self, im_q: Tensor, im_k: Tensor) -> Tensor:
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        queue = self.get_buffer("queue")
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.clone().detach()], dim=1) / 0.2
        queue[:, self.pointer : self.pointer + len(k)] = k.T
        self.pointer = (self.pointer + len(k)) % queue.shape[1]
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


def moco(script: Script) -> None:
    """A contrastive queue."""
    torch.manual_seed(3)
    model = MoCo()
    engine = script.engine(model)
    for number, (x, _) in enumerate(batches()):
        loss = engine(x, x + 0.1 * batch(2000 + number)[0])
        engine.backward(loss)
        engine.step()
        script.read("loss", [loss])
    script.read("keys", [*model.encoder_k.parameters(), model.get_buffer("queue")])


def _act(model: nn.Module, pipe: Connection) -> None:
    while pipe.recv():
        pipe.send([p.detach().numpy() for p in model.parameters()])


def actor(script: Script) -> None:
    """An actor in another process, which acts with the learner's weights: `model.share_memory()`."""
    model = net().share_memory()
    ours, theirs = Pipe()
    process = get_context("fork").Process(target=_act, args=(model, theirs), daemon=True)
    process.start()
    engine = script.engine(model)
    for x, y in batches():
        engine.backward(F.mse_loss(engine(x), y))
        engine.step()
        ours.send(True)
        script.read("actor's weights", map(torch.from_numpy, ours.recv()))
    ours.send(False)
    process.join()
