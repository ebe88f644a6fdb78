"""fp32 values of parameters that were rounded: where masters come from that are better than their weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from zenflow.errors import ConfigError
from zenflow.ranks import Ranks
from zenflow.state import reread


class InitialMasters:
    """What was given (with several ranks, to rank 0), until the parameters' state begins."""

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self._given: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}

    def give(self, masters: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Keep masters, fp32 in their parameters' shapes, on any device; raises ConfigError for other ones."""
        for parameter, master in masters.items():
            if master.shape != parameter.shape or master.dtype != torch.float32:
                raise ConfigError(
                    f"a master is {master.dtype} of shape {tuple(master.shape)}; "
                    f"it must be torch.float32 of its parameter's shape {tuple(parameter.shape)}"
                )
        self._given |= {id(parameter): (parameter, master) for parameter, master in masters.items()}

    def take(self, parameter: nn.Parameter) -> torch.Tensor:
        """The values that a parameter's masters begin with, in its shape; what was given for it is let go."""
        weights = parameter.detach()
        _, given = self._given.pop(id(parameter), (None, None))
        if given is None:
            return weights
        values = given.to(weights.device, copy=True)
        if self._ranks is not None:
            self._ranks.broadcast(values)
        return reread(values, weights)

    def peek(self, parameter: nn.Parameter) -> torch.Tensor:
        """fp32 in a parameter's shape: what its masters would begin with now, by what this rank was given."""
        weights = parameter.detach()
        _, given = self._given.get(id(parameter), (None, None))
        return weights.float() if given is None else reread(given.to(weights.device), weights)
