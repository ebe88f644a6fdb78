"""Everything that trainings, searches and daemons of tests need, imported once.

No operation of torch runs here: what is forked must find no threads.
"""

import gc
import importlib
import multiprocessing

MODULES = (
    "deepspeed",
    "deepspeed.runtime.zero.stage_1_and_2",
    "optuna",
    "scipy.optimize",
    "tests.zftune.daemon.faults.lives",
    "tests.zftune.store.writers",
    "tests.zftune.tuner.commanding",
    "tests.zftune.tuner.killable",
    "tests.zftune.tuner.searching",
    "tests.zygote",
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
    "zftune.tuner.attach",
    "zftune.tuner.forecast",
    "zftune.tuner.preparing",
    "zftune.tuner.propose",
    "zftune.tuner.search",
    "zftune.tuner.thinker",
)
MAIN = multiprocessing.current_process()
"""What a process is in which multiprocessing has started nothing."""

for name in MODULES:
    importlib.import_module(name)
gc.collect()
gc.freeze()  # or every fork would look through all of it
