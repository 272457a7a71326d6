"""The agent: the program that answers for a container.

It is a command, never a daemon: one call answers one request and ends. It travels to the target as one bundle with
libtmux inside, so everything here imports only the standard library, libtmux and specctl's own pure modules.
"""
