"""Emulated hardware: an accelerator with the times of a rig, and the simulated clock by which it takes them."""

from zftune.emulation.emulator import EmulatedAccelerator, EmulatedMemory
from zftune.emulation.rig import Rig, RigSpec

__all__ = ["EmulatedAccelerator", "EmulatedMemory", "Rig", "RigSpec"]
