"""Everything that trainings, searches and daemons of tests need, imported once.

No operation of torch runs here: what is forked must find no threads.
"""

import functools
import gc
import importlib
import multiprocessing
import os
from typing import Any

from tests.support import upstream_ops

MODULES = (
    "deepspeed",
    "deepspeed.runtime.zero.stage_1_and_2",
    "optuna",
    "scipy.optimize",
    "tests.support.zftune.daemon.faults.lives",
    "tests.support.zftune.store.writers",
    "tests.support.zftune.tuner.commanding",
    "tests.support.zftune.tuner.killable",
    "tests.support.zftune.tuner.searching",
    "tests.support.fork_server",
    "torch.distributed",
    "torch.optim",
    "torch.utils.data",
    "transformers.models.llama.modeling_llama",
    "uvicorn.protocols.http.h11_impl",
    "uvicorn.server",
    "zenflow",
    "zftune.agent.arming",
    "zftune.planner",
    "zftune.store.opening",
    "zftune.store.store",
    "zftune.attaching",
    "zftune.tuner.setup",
    "zftune.tuner.search",
)
MAIN = multiprocessing.current_process()
"""What a process is in which multiprocessing has started nothing."""

cpuinfo: Any = importlib.import_module("cpuinfo")  # before DeepSpeed takes the function
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # 1.4 s, at every engine
cpuinfo.get_cpu_info()
for name in MODULES:
    importlib.import_module(name)
upstream_ops.load_what_is_compiled()
if "ZFTUNE_TEST_OTHER_MACHINE" in os.environ:
    importlib.import_module("tests.support.other_machine")
gc.collect()
gc.freeze()  # or every fork would look through all of it
