"""What the node's samplers saw, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from zftune.daemon.sampling import Node

_OF_GPU = {
    "utilisation_percent": ("zftune_gpu_utilisation_percent", "Utilisation by NVML, mean of the last seconds"),
    "power_w": ("zftune_gpu_power_watts", "Power by NVML, mean of the last seconds"),
    "memory_used_bytes": ("zftune_gpu_memory_used_bytes", "Memory in use by NVML"),
    "other_processes": ("zftune_gpu_other_processes", "Processes on the GPU that belong to no run"),
}
_OF_HOST = {
    "machine_cpu_percent": ("zftune_host_cpu_percent", "Share of all cores in use"),
    "cpu_percent": ("zftune_runs_cpu_percent", "Processor time of the runs' processes, 100 a core"),
    "memory_used_bytes": ("zftune_host_memory_used_bytes", "Memory in use on this machine"),
}


class NodeFigures(Collector):
    """Means of the last seconds; what is not known is left out.

    Args:
        node: samples.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Every figure that is known now."""
        gpus = self._node.gpus()
        for field, (name, words) in _OF_GPU.items():
            family = GaugeMetricFamily(name, words, labels=("gpu",))
            for uuid, seen in gpus.items():
                value = (seen.figures or {}).get(field)
                if value is not None:
                    family.add_metric([uuid], float(value))
            yield family
        host = self._node.host.figures or {}
        for field, (name, words) in _OF_HOST.items():
            family = GaugeMetricFamily(name, words)
            if host.get(field) is not None:
                family.add_metric([], float(host[field]))
            yield family
