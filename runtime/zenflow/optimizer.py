"""`ZenFlowOptimizer`: an update rule whose state is split between the GPU and the host."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, overload

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from zenflow import checkpoint, full_state, living, torch_state
from zenflow.config import ZenFlowConfig
from zenflow.device import Device, Mark, device_for
from zenflow.errors import ConfigError, UnsupportedError, ZenFlowError
from zenflow.full_state import StateView, flushed
from zenflow.history import History, Timeline, TimelineRecorder
from zenflow.host.places import OwnProcess
from zenflow.layout import DTYPE_NAMES, DTYPES, require_owner
from zenflow.ledger import Balance
from zenflow.partition import Partition, shards_of
from zenflow.ranks import Ranks
from zenflow.rules import Rule
from zenflow.sharded import Shards, require_known, require_whole
from zenflow.signals import HeldSignals, undivided
from zenflow.stats import StepStats
from zenflow.training import Training


class ZenFlowOptimizer(Optimizer):
    """An update rule with resident, selected and deferred columns (ZenFlow, arXiv 2505.12242; Twin-Flow).

    With `update_interval=1, overlap_step=False` it is the rule on fp32 masters, wherever the state lives; with a longer
    window the deferred columns receive the same updates later, at most S + L - 1 steps. Any elementwise rule fits the
    split; `zenflow.family` holds an optimizer for each. A forked child has neither the host state nor the threads: what
    it calls raises `UnsupportedError`, but for `abandon()`.

    Args:
        params: parameters or parameter groups, fp32, bf16 or fp16, all on one device; whole, or all of them sharded by
            rows over all ranks (`fully_shard`, FSDP2): then this optimizer works on the rows of its rank. What is
            frozen may be of any dtype and anywhere: it is ignored until it is thawed, and must be of such a dtype and
            there once it has a gradient.
        defaults: the rule's hyperparameters, for groups that do not set their own.
        config: the knobs; None takes the defaults. For weights that FSDP2 keeps on the host (`CPUOffloadPolicy`)
            `topk_ratio` has to be 0; None then has it 0, and updates one step late.
        module: the model that owns the parameters. Gives names, finds transformers' `Conv1D`, and lets a wait for a
            late host update be left to the first use of the weight.
        device: the accelerator; None takes the one that the parameters are on, or that computes with them.
        partition: how several ranks share out the state of parameters that all of them have; None: they do not.

    Raises:
        ConfigError: a hyperparameter or knob is not allowed, or `module` has none of the parameters.
        UnsupportedError: a parameter's dtype or device, it is sharded otherwise (FSDP1, tensor parallel plans, ZeRO
            stage 3), has no rows that ranks could share out, or another optimizer trains it, and others besides.
    """

    _step_supports_amp_scaling = True  # GradScaler leaves unscaling and skipping to us: `grad_scale` and `found_inf`
    _save_advice = "call the optimizer's flush() before the last save, or save within its flushed_weights()"
    _saves_room = True  # zeros before the first step, into which torch.distributed.checkpoint can load

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        rule: Rule,
        *,
        config: ZenFlowConfig | None = None,
        module: nn.Module | None = None,
        device: Device | None = None,
        partition: Partition | None = None,
    ) -> None:
        self._rule = rule
        self._partition = partition
        self._built = self._speaks_torch = False
        self._known: list[int] = []  # parameters that are trained
        self._shown: list[Any] = []  # the values of `state` after the last step
        self._close_hooks: OrderedDict[int, Callable[[], None]] = OrderedDict()
        self._process = OwnProcess()
        super().__init__(params, defaults)
        if not self._parameters:
            raise ConfigError("params holds no parameter; it must hold at least one")
        if config is not None and not isinstance(config, ZenFlowConfig):
            raise ConfigError.of(
                "config", type(config).__name__, "a ZenFlowConfig, such as ZenFlowConfig(topk_ratio=0.1)"
            )
        require_owner(module, self._parameters)
        self._module, self._asked = module, config
        sharing = living.sharing(self)
        self._own = self._made(device)
        living.take_over(sharing)  # nothing is refused any more
        self._training.gradients.watch(self._groups, self._training.model.weights)
        self._built = True
        living.add(self)

    def _made(self, device: Device | None) -> Training:
        """A run of the parameters as they are now, with the weights of rank 0 where all ranks have the same."""
        parameters = self._parameters
        shards = shards_of(parameters, self._partition)
        config = (shards.knobs(self._asked) if shards is not None else self._asked or ZenFlowConfig()).resolved()
        if device is None:
            home = next((one.device for one in parameters if one.requires_grad), parameters[0].device)
            device = device_for(home, None if shards is None else shards.computing)
        ranks = Ranks.of(config, shards)
        made = Training(self._rule, config, self._module, device, ranks=ranks, shards=shards)
        if ranks is not None:
            ranks.share(parameters, device.torch_device)
        return made

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """The groups with what is trained here: of sharded parameters, the rows of this rank."""
        shards = self._own.shards
        return self.param_groups if shards is None else shards.groups(self.param_groups)

    def _rows(self, parameter: nn.Parameter) -> nn.Parameter:
        return parameter if self._own.shards is None else self._own.shards.rows(parameter)

    @property
    def is_partitioned(self) -> bool:
        """Whether ranks that all have the parameters share out their state (`partition`)."""
        return self._own.shards is not None and self._own.shards.keeps_whole

    def own_rows(self, parameter: nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        """What this rank has state of, of a parameter's `values` (all of them, or a DTensor): all, or some rows."""
        return values if self._own.shards is None else self._own.shards.own(parameter, values)

    @property
    def rows(self) -> list[nn.Parameter]:
        """The parameters in the order of the groups; where ranks share out their state, this rank's rows of them."""
        self._follow_sharding()
        return [rows for group in self._groups for rows in group["params"]]

    def _follow_sharding(self) -> None:
        """Begin anew before the first step, where somebody has sharded the model and swapped the groups' parameters."""
        before = self._own
        if before.begun or before.shards is not None:
            return
        parameters = self._parameters
        require_known(parameters)
        if (shards := Shards.of(parameters)) is None:
            return
        self._own = self._made(before.runtime.device if shards.computing is None else None)
        before.close()
        self._known = list(map(id, parameters))
        self._own.gradients.watch(self._groups, [])
        self.state.clear()
        for parameter in parameters:
            self.state[parameter] = StateView(self, parameter, self._rule.moment_names)

    @property
    def _training(self) -> Training:
        """Raises UnsupportedError in a forked child."""
        self._process.require()
        self._follow_sharding()
        return self._own

    @property
    def trains(self) -> bool:
        """Whether it can take steps here: it was not closed, and this is no forked child."""
        return self._process.is_this and self._own.open

    @property
    def config(self) -> ZenFlowConfig:
        """The knobs in force; a look-ahead that the rule cannot guess is "coast"."""
        return self._heeded(self._own.config)

    def _heeded(self, config: ZenFlowConfig) -> ZenFlowConfig:
        coasts = config.look_ahead == "guess" and not self._rule.guesses
        return config.changed({"look_ahead": "coast"}) if coasts else config

    @property
    def asked_config(self) -> ZenFlowConfig:
        """The knobs that the script asks for: those it was made with, where a saved state brought those in force."""
        return self._heeded(self._own.asked)

    @property
    def kept_knobs(self) -> Mapping[str, Any] | None:
        """Knobs to go back to where others are tried: who tries them says so, to be saved; `set_knobs` forgets them."""
        return self._own.kept

    @kept_knobs.setter
    def kept_knobs(self, knobs: Mapping[str, Any] | None) -> None:
        self._own.kept = knobs

    @property
    def rule(self) -> Rule:
        return self._rule

    @property
    def device(self) -> Device:
        return self._own.runtime.device

    @property
    def module(self) -> nn.Module | None:
        return self._module

    @property
    def steps(self) -> int:
        """How many steps it has taken, over all runs that it was saved in: the number of the last one."""
        return self._own.clock.step

    @property
    def last_end(self) -> Mark | None:
        """The mark of `device` at which the last step ended and the next began, as in `StepStats`; None before one."""
        return self._training.history.last_end

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """0-dim fp32: L2 norm of the unscaled, unclipped gradient, where `max_grad_norm` or `skip_nonfinite` is on."""
        return self._training.grad_norm

    def give_masters(self, masters: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Begin with fp32 values of parameters that were rounded since; before the first gradient.

        Args:
            masters: of some parameters, in their shapes, on any device; kept until their first gradient. Elements that
                do not round to what the parameter holds then are ignored. Sharded ones: DTensors, or this rank's rows.

        Raises:
            ConfigError: a gradient has come, or a tensor has another shape than its parameter.
        """
        if self._training.begun:
            raise ConfigError("give_masters() was called after the first gradient; it must be called before")
        self._training.runtime.masters.give({self._rows(p): self.own_rows(p, one) for p, one in masters.items()})

    # --- torch.optim.Optimizer -------------------------------------------------------------------------------------

    @undivided
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group; after the first step this flushes, and splits the model anew.

        Raises:
            UnsupportedError: a parameter cannot be split, or is sharded.
            ConfigError: a hyperparameter is not allowed.
            HostMemoryError: the host has less memory than the new split needs.
            HostEngineError: host work failed.
        """
        super().add_param_group(param_group)
        try:
            self._rule.check(self.param_groups[-1])
            self._take_in(self.param_groups[-1]["params"])
        except (ZenFlowError, MemoryError):
            self.param_groups.pop()
            raise

    def _take_in(self, parameters: list[nn.Parameter]) -> None:
        """Train parameters that have come into the groups."""
        require_known(parameters)
        for parameter in parameters:
            if parameter.requires_grad and parameter.dtype not in DTYPES:
                raise UnsupportedError(f"a parameter is {parameter.dtype}; it must be {DTYPE_NAMES}")
        if self._built:
            require = require_whole if self._own.shards is None else self._own.shards.require
            require(parameters)
            self._training.follow_groups(self._groups, {id(parameter) for parameter in parameters})
            self._training.gradients.watch(self._groups, self._training.model.weights)
        for parameter in parameters:
            # Never empty: some tools take an empty state for one that has to be made.
            self.state[parameter] = StateView(self, parameter, self._rule.moment_names)
        self._known = list(map(id, self._parameters))

    def _follow_edits(self) -> None:
        """Train what is in the lists of `param_groups` by now, anew where its state was removed or replaced."""
        parameters, shown = self._parameters, [*self.state.values()]
        same = list(map(id, parameters)) == self._known
        if same and len(shown) == len(self._shown) and all(map(operator.is_, shown, self._shown)):
            return
        known, states = {*self._known}, {one: self.state.get(one) for one in parameters}
        edited = [
            one
            for one, state in states.items()
            if id(one) not in known or not isinstance(state, StateView) or not state.is_of(one)
        ]
        if not same or edited:
            if self._own.shards is not None:
                raise UnsupportedError("param_groups or state was edited, which ranks share: use add_param_group()")
            given = {one: full_state.carried(self._own, one, state) for one in edited if (state := states[one])}
            self._take_in(edited)
            if given:
                full_state.begin_carried(self._own, given, self._groups)
            for gone in self.state.keys() - {*parameters}:
                del self.state[gone]
        self._shown = [*self.state.values()]

    def look_at_state(self) -> None:
        """Have the next step compare `state` with what is trained."""
        self._shown = []

    @undivided
    def state_dict(self) -> dict[str, Any]:
        """All state in torch's form: copies on the CPU, whatever step of a window it is.

        Waits for the host work that was submitted, applies nothing that is not due and flushes nothing. Save the model
        of the same moment with it. `zenflow.checkpoint_format` describes what it holds: of sharded parameters, what
        this rank has. `zenflow.distributed.save` writes a checkpoint of all ranks.

        Raises:
            HostEngineError: host work failed.
            ConfigError: within `torch_state()`, updates are pending.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._follow_sharding()
        save = torch_state.save if self._speaks_torch else functools.partial(checkpoint.save, room=self._saves_room)
        saved = save(self._training, self._groups)
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    @undivided
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state, bit for bit; load the model of the same moment before or after.

        The saved knobs go on, those set while it trained included. Live knobs in which this optimizer was constructed
        otherwise than the saved one are taken up as by `set_knobs`.

        Raises:
            CheckpointError: it is truncated or not of this optimizer. As with the others, nothing has changed then.
            ConfigError: a hyperparameter or a combination of knobs is not allowed.
            HostMemoryError: the host has less memory.
            RankError: another rank could not load it.
        """
        state_dict = copy.copy(state_dict)  # which hooks may change
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        self._follow_sharding()
        saved = checkpoint.read_on_all(self._training, state_dict, self._groups, of_torch=self._speaks_torch)
        own = [dict(group) for group in self.param_groups]
        for group, values in zip(self.param_groups, saved.groups, strict=True):
            group.update(values)
        try:
            training = checkpoint.resumed(self._training, saved, self._groups)
        except BaseException:
            for group, values in zip(self.param_groups, own, strict=True):
                group.clear()
                group.update(values)
            raise
        if self._training.open:
            self._training.gradients.restore()  # what has left of a step to come is its own gradient
        self._training.close()
        self._own = training
        training.gradients.watch(self._groups, training.model.weights)
        training.cover_weights()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step with the gradients in `.grad`; never synchronises the device.

        Raises:
            HostEngineError: host work failed, in this step or an earlier one.
            UnsupportedError: a sparse gradient, or a parameter was given another shape, dtype or device.
            RankError: another rank failed in the step before, which was skipped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with HeldSignals(), torch.inference_mode(False), torch.no_grad():
            training = self._training
            self._follow_edits()
            # GradScaler sets and deletes these two around step().
            scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
            training.step(self._groups, scale, found_inf)
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """Refuse copies, which would share the state or lose it, with `UnsupportedError`."""
        raise UnsupportedError("a ZenFlow optimizer cannot be copied or pickled: make a new one for the copied model")

    @undivided
    def full_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """One parameter's state in its own shape: copies on the CPU; changes nothing.

        Gradients of the open window are not in it. Those of a closed one are, though its weights may still be on
        their way to the device. Waits for the host work that was submitted.

        Returns:
            fp32 "master" and the rule's moments by torch's names, as they begin where there was no update yet, of
            sharded parameters DTensors; "step", 0-dim fp32: the updates of the columns that had most, 0 on a rank
            without rows.

        Raises:
            ConfigError: the parameter is another optimizer's.
            HostEngineError: host work failed.
        """
        return full_state.read(self._training, self._rows(parameter), self._group_of(parameter))

    @undivided
    def set_full_state(self, parameter: nn.Parameter, name: str, value: torch.Tensor) -> None:
        """Set one parameter's master, and its weight with it, or a moment; gradients of the open window come on top.

        Setting what `full_state` has just returned changes nothing. A new master makes the updates of closed windows
        visible at once.

        Args:
            name: "master", or "step" or a moment by torch's name.
            value: as many elements as the parameter has (a step one), in any dtype, on any device; is copied. Of a
                sharded one a DTensor, or the rows of this rank.

        Raises:
            ConfigError: the parameter is another optimizer's, there is no such name, the size is another, it is a
                moment of a parameter that was never updated, or the weights are flushed ones (`flushed_weights`).
            HostEngineError: host work failed.
        """
        rows, own = self._rows(parameter), self.own_rows(parameter, value)
        full_state.write(self._training, rows, self._group_of(parameter), name, own)
        if name == full_state.MASTER and self._own.shards is not None:
            self._own.shards.give(parameter, value)

    def _group_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        for group in self.param_groups:
            if any(one is parameter for one in group["params"]):
                return group
        if id(parameter) in self._known:  # it was taken out since the last step
            return self.param_groups[0]
        raise ConfigError(f"a parameter of shape {tuple(parameter.shape)} is not in the optimizer")

    @undivided
    def average_gradients(self) -> None:
        """Average `.grad` over the ranks now, on all of them, where `step()` would; that averages only what is new.

        Raises:
            UnsupportedError: a gradient is sparse.
        """
        self._training.average_gradients(self._groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; what was averaged and is no longer in `.grad` (`partition`) goes too."""
        super().zero_grad(set_to_none)
        if self._own.shards is not None:
            self._own.shards.drop_gradients()

    @undivided
    def gather(self) -> None:
        """Let ranks that share out the state of whole parameters have each other's rows; to be called on all of them.

        `step()`, `flush()` and `close()` do it; it is needed after `load_state_dict()` alone.
        """
        self._training.gather()

    @undivided
    def flush(self) -> None:
        """Close the window and apply every pending host update now; after `close()` there is none.

        Raises:
            HostEngineError: host work failed.
            UnsupportedError: a parameter was given another shape, dtype or device.
        """
        self._training.flush()

    @contextlib.contextmanager
    def flushed_weights(self) -> Iterator[int]:
        """Let the model hold the weights that a flush would make, for a file that is used without the optimizer.

        Afterwards all is as it was. A `state_dict()` that is taken within bears a mark, and resumes bit for bit with
        the model's file, loaded in either order. What was written since `load_state_dict()` stays as written.

        Yields:
            How many steps of deferred gradients were pending, which the weights hold now.

        Raises:
            HostEngineError: host work failed.
        """
        with contextlib.ExitStack() as stack:
            with HeldSignals(), torch.inference_mode(False), torch.no_grad():
                steps = stack.enter_context(flushed(self._training))
            try:
                yield steps
            finally:
                with HeldSignals(), torch.inference_mode(False), torch.no_grad():
                    stack.close()

    @contextlib.contextmanager
    def torch_state(self) -> Iterator[None]:
        """Let `state_dict()` and `load_state_dict()` exchange state with torch's optimizer of the same name.

        Both are that optimizer's, step and moments, as torch's functions for distributed checkpoints take them; on all
        ranks. fp32 masters, selection and knobs are not in it: what is loaded begins with the weights' values. Where
        columns were updated differently often (`deferred_update="mean"`), the step is that of those that had most.

        Raises:
            ConfigError: from `state_dict()`: updates are pending: call `flush()` first.
            UnsupportedError: from both: the rule is not AdamW, Adam or Adagrad.
        """
        self._speaks_torch = True
        try:
            yield
        finally:
            self._speaks_torch = False

    @undivided
    def set_knobs(self, **knobs: Any) -> int:
        """Change knobs while training: the next `step()` closes the window under the old ones, then the new ones hold.

        Where `topk_ratio` or `offload_ratio` change, that step is synchronous and columns move between the tiers, one
        weight at a time. Several calls before the next step add up.

        Args:
            knobs: fields of `ZenFlowConfig` by name; `zenflow.config.LIVE_KNOBS` lists them.

        Returns:
            The number of the step after which they hold (before the first step: that with which they do).

        Raises:
            ConfigError: a knob cannot be changed or has a value that is not allowed; nothing has changed then.
            HostMemoryError: the host has less memory than they need.
            HostEngineError: threads could not be started, or host work failed.
        """
        return self._training.set_knobs(knobs, self._groups)

    def stats(self) -> StepStats | None:
        """The newest step that could be resolved without waiting; None before the first."""
        return next(reversed(self._training.history.steps(wait=False)), None)

    @property
    def records(self) -> History:
        """The steps' records, which outlive this optimizer and keep neither it nor the model alive."""
        return self._training.history

    def history(self, *, wait: bool = False, after: int = 0) -> list[StepStats]:
        """The last steps that could be resolved, oldest first (4096 at most), with a number above `after`.

        With `wait` it waits for the device, so that the newest step is among them.
        """
        return self._training.history.steps(wait=wait, after=after)

    def record_timeline(self, steps: int | None = None) -> TimelineRecorder:
        """Record what the compute stream's waits, the links and the host do, from the next close of a window on.

        Costs nothing where it is not called. The recorder takes what only the caller knows, such as forward and
        backward; a second recording replaces one that is not over.

        Args:
            steps: how many steps; None: one whole update window.

        Raises:
            ConfigError: `steps` is less than 1.
        """
        if steps is not None and steps < 1:
            raise ConfigError.of("steps", steps, "an integer >= 1, or None for one update window")
        return self._training.history.record(steps)

    def timeline(self) -> Timeline | None:
        """What was recorded; None where nothing was, or its steps are not over. Waits for the host and the device.

        Raises:
            HostEngineError: host work failed.
        """
        recorder = self._training.history.recorder
        if recorder is None or not recorder.over:
            return None
        if self._training.open:
            self._training.engine.drain()  # work that runs over the steps' end is part of them
        return recorder.timeline()

    @undivided
    def ledger(self) -> dict[str, Balance]:
        """The gradient ledger by parameter: that nothing was lost so far. Waits for the host and the device.

        Raises:
            ConfigError: the configuration does not ask for one (`ledger=True`).
            HostEngineError: host work failed.
        """
        return self._training.ledger()

    def host_bytes(self) -> dict[str, int]:
        """Host memory by use: "state", "log", "staging", "migration"; "spare", kept of longer logs; "peak" of all."""
        runtime = self._training.runtime
        by_use, spare = runtime.memory.bytes_by_use, runtime.log.spare_bytes
        return {**by_use, "log": by_use["log"] - spare, "spare": spare, "peak": runtime.memory.peak_bytes}

    @property
    def host_engine(self) -> tuple[str, int]:
        """Who updates on the host ("native", or "eager" for PyTorch), and with how many threads."""
        backend = self._training.engine.backend
        return backend.name, backend.threads

    def register_close_hook(self, hook: Callable[[], None]) -> RemovableHandle:
        """Have a function called when `close()` begins: knobs can still be changed."""
        handle = RemovableHandle(self._close_hooks)
        self._close_hooks[handle.id] = hook
        return handle

    def close(self) -> None:
        """Apply what is pending and end the host engine; afterwards `step()` fails.

        Raises:
            HostEngineError: host work failed; the engine is ended all the same.
        """
        if self._training.open:
            try:
                for hook in tuple(self._close_hooks.values()):
                    hook()
            finally:
                self._flush_and_abandon()

    @undivided
    def _flush_and_abandon(self) -> None:
        try:
            self.flush()
        finally:
            self.abandon()

    def __del__(self) -> None:
        own = getattr(self, "_own", None)
        if own is not None and own.open and living.let_go is not None:  # modules are gone where a forked child ends
            living.let_go(self)

    def abandon(self) -> None:
        """End the host engine, applying nothing that is pending; in a forked child, take the hooks off its model."""
        self._own.close()
