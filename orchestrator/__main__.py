"""Where `specctl` begins: the streams and Ctrl-C are made safe before anything slow is imported.

Importing what a verb needs takes a few hundred milliseconds, and a Ctrl-C in them ends the command without a word. What
a verb makes of Ctrl-C is its own to say (`cli/`); before it and after it there is nothing to say.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, _leave)
    from orchestrator import streams

    streams.prepare()
    if "_SPECCTL_COMPLETE" in os.environ:
        from orchestrator import completion

        if (said := completion.answer(os.environ)) is not None:
            sys.stdout.write(said + "\n")
            return streams.finish(0)
    from orchestrator import cli

    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = cli.main()
        if interruptible:
            signal.signal(signal.SIGINT, _leave)
        return streams.finish(code)
    except KeyboardInterrupt:
        return 130
    except SystemExit as error:  # a stream that nobody reads any more
        return streams.finish(int(error.code or 0))


def _leave(number: int, frame: object) -> None:
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
