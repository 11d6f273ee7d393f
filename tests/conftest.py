"""Ctrl-C as at a terminal: in what a script starts in the background it is ignored, and the tests of interruptions would see nothing."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
