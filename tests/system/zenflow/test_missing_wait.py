"""The fault of waiting, planted into the runtime on a rig, that may end its process: so it gets one."""

from __future__ import annotations

import signal

import pytest

from tests.support import forked

SCRIPT = """
from zenflow.host.engine import Job
from tests.support.zenflow.small import Stack, seeded, train
from tests.unit.zftune.emulation.test_waiting_faults import CONFIG, differs, trained

right = train(seeded(Stack), CONFIG, steps=9)
assert not differs(trained(link_d2h_gbps=5e-4), right)
init = Job.__init__


def careless(self, *arguments, inputs, **options):
    init(self, *arguments, inputs=[], **options)


Job.__init__ = careless
print(differs(trained(link_d2h_gbps=5e-4), right))
"""


@pytest.mark.smoke
def test_a_missing_wait() -> None:
    """The host reads what has not arrived: numbers are wrong then, or addresses."""
    done = forked.run(SCRIPT, warnings="ignore")
    assert done.returncode == -signal.SIGSEGV or (done.returncode, done.stdout) == (0, "True\n"), done.stderr
