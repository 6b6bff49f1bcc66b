"""An HTTP emulator of the Prime platform, to which the unmodified prime-sandboxes and prime-tunnel SDKs talk.

    with PrimeEmulator(directory) as emulator:
        os.environ.update(emulator.environ)
        emulator.fault("create_sandbox", status=429, retry_after=1)
        ...
        assert emulator.leaked() == {"sandboxes": [], "tunnels": [], "processes": []}

The server is a process of its own (``python -m emulators.prime``); `PrimeEmulator` is the tests' handle on it. One
module for each concern:

    handle.py     the tests' side: starts, controls and stops the server
    control.py    the server's end of the handle's channel
    server.py     routes, counts, authenticates; applies faults
    web.py        HTTP/1.1 on sockets that a fault may drop or hang
    platform.py   the sandboxes API            (models.py: the bodies it accepts)
    gateway.py    one sandbox's gateway: commands, uploads, downloads, reads
    sandboxes.py  sandboxes and their lifetime
    commands.py   running commands and background jobs; connect.py is their wire form
    processes.py  starting real processes and noticing their end
    paths.py      gives each sandbox a file tree of its own
    tunnels.py    the tunnels API and frps; forward.py is the public edge; frpc.py the stand-in client
    faults.py     what tests inject; refusals.py is how handlers say no

What it cannot be: a container. A sandbox sees the host's programs, network and (outside of a few folders) files; limits
on memory, processors and disk are recorded and not enforced, nor is ``idle_timeout_minutes``. Live processes
(``open_process``), checkpoints, volumes and private networks of the SDK are not served: such a request is refused and
recorded.
"""

from emulators.prime.handle import PrimeEmulator

__all__ = ["PrimeEmulator"]
