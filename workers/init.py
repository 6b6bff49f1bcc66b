"""The duties of process 1, for a container whose first process is the ``rollouts`` command.

The kernel gives process 1 no default actions for signals: one that comes before its handlers are set would be lost.
It also makes it the parent of every orphan of the container, and agents leave many: what nobody waits for stays in the
process table until that is full. So process 1 becomes a mere parent of the command, as tini and dumb-init are: it
passes signals on, waits for whoever ends, and ends as the command does.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

#: Seconds that others have to end after the command, before the kernel kills them: its watchdogs remove directories.
LINGER = 5.0

#: Those that the kernel raises for a fault of the process itself, and those that nobody can wait for.
_OWN = {
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS, signal.SIGABRT),
    *(signal.SIGKILL, signal.SIGSTOP),
}
#: Job control of a terminal, of which process 1 is no part.
_TERMINAL = {signal.SIGTTIN, signal.SIGTTOU, signal.SIGTSTP, signal.SIGCONT}


def become_init_if_first() -> None:
    """As process 1, stay here as the parent of the command and end the process with its status; the child returns.

    In any other process this does nothing. To be called while there is one thread, which `os.fork` carries over.
    """
    if os.getpid() == 1:
        run_as_child()


def run_as_child() -> None:
    """Return in a child process; the parent never does, it is the child's init until that has ended."""
    waited_for = signal.valid_signals() - _OWN
    # From before there is a child: no signal may come in between. One that is blocked waits, also in process 1.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    child = os.fork()
    if child:
        os._exit(_serve(child, waited_for))
    # A group of its own: a terminal sends Ctrl-C to the whole foreground group, and here it shall come once.
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _serve(child: int, waited_for: Iterable[int]) -> int:
    """Pass signals on to ``child`` and reap whoever ends, until the child has; returns the status to exit with."""
    while True:
        number = signal.sigwait(waited_for)
        if number == signal.SIGCHLD:
            ended = dict(_reaped())
            if child in ended:
                _linger()
                return ended[child]
        elif number not in _TERMINAL:
            with suppress(ProcessLookupError):
                os.kill(child, number)


def _reaped() -> Iterable[tuple[int, int]]:
    """Reap all that have ended; yields their ids, and the status that a shell would give them."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            yield ended[0], code if code >= 0 else 128 - code


def _linger() -> None:
    """Wait for the others, such as the watchdog of a worker that was killed, but not for long."""
    end = time.monotonic() + LINGER
    with suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
