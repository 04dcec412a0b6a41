"""Servers by hand: `python -m tests.servers run NAME...`, until Ctrl-C or SIGTERM."""

import argparse
import signal
import sys

from tests.servers import CLUSTERS, NAMES, SQLServer, Unavailable, cluster, start, stop_all


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.servers")
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="start servers and print their URLs")
    run.add_argument("names", nargs="+", choices=(*NAMES, *CLUSTERS), metavar="NAME")
    names: list[str] = parser.parse_args().names

    ends = {signal.SIGINT, signal.SIGTERM}
    try:
        for name in names:
            for server in cluster(name) if name in CLUSTERS else [start(name)]:
                drivers = list(server.drivers) if isinstance(server, SQLServer) else ["redis"]
                print(f"{server.name} (log: {server.log})")
                for driver in drivers:
                    print(f"    {server.url(driver)}", flush=True)
        # Blocked only now: a blocked signal would be blocked in the servers, too.
        signal.pthread_sigmask(signal.SIG_BLOCK, ends)
        signal.sigwait(ends)
    except Unavailable as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    finally:
        stop_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
