"""`python -m decentlam.elastic.store`: the store of an elastic run, apart from those who train."""

from __future__ import annotations

import argparse
import signal
import sys
import time


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m decentlam.elastic.store", description=__doc__)
    parser.add_argument("--host", required=True, help="this machine's address, as others reach it")
    parser.add_argument("--port", type=int, default=29500, help="0 is a free one")
    options = parser.parse_args(arguments)
    from decentlam.network.store import open_store

    try:
        store = open_store(options.host, options.port)
    except (OSError, OverflowError) as error:
        parser.error(f"cannot listen at {options.host}:{options.port}: {error}")
    place = f"MASTER_ADDR={options.host} MASTER_PORT={store.port}"
    try:
        print(f"{place} TORCHELASTIC_USE_AGENT_STORE=True", flush=True)
        print("start the processes with these; Ctrl-C ends the store", file=sys.stderr)
        while True:
            time.sleep(1.0)  # signal.pause() would miss a signal that comes just before it
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
