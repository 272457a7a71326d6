"""One file a verb: what the command line can do. A verb returns a result or raises an error; it never prints."""
