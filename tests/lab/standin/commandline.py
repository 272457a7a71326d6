"""How the real pct reads its command line: Getopt::Long in permute mode, and Proxmox's checks of the values."""

import locale
import re
import sys

FILE_OPTIONS = {"user": "str", "group": "str", "perms": "str"}
# command -> (usage, names of the arguments, options with their kinds)
COMMANDS = {
    "config": ("<vmid> [OPTIONS]", ["vmid"], {"current": "bool", "snapshot": "str"}),
    "enter": ("<vmid> [OPTIONS]", ["vmid"], {"keep-env": "bool"}),
    "exec": ("<vmid> [<extra-args>] [OPTIONS]", ["vmid", "extra-args"], {"keep-env": "bool"}),
    "list": ("", [], {}),
    "pull": ("<vmid> <path> <destination> [OPTIONS]", ["vmid", "path", "destination"], FILE_OPTIONS),
    "push": ("<vmid> <file> <destination> [OPTIONS]", ["vmid", "file", "destination"], FILE_OPTIONS),
    "reboot": ("<vmid> [OPTIONS]", ["vmid"], {"timeout": "int"}),
    "shutdown": ("<vmid> [OPTIONS]", ["vmid"], {"timeout": "int", "forceStop": "bool"}),
    "start": ("<vmid> [OPTIONS]", ["vmid"], {"skiplock": "bool", "debug": "bool"}),
    "status": ("<vmid> [OPTIONS]", ["vmid"], {"verbose": "bool"}),
    "stop": ("<vmid> [OPTIONS]", ["vmid"], {"skiplock": "bool", "overrule-shutdown": "bool"}),
    "unlock": ("<vmid>", ["vmid"], {}),
}
BOOLEANS = {"": True, "1": True, "on": True, "yes": True, "true": True,
            "0": False, "off": False, "no": False, "false": False}  # fmt: skip


class Die(Exception):
    """A Perl `die`: the text on stderr, and an exit code that depends on where it happened."""

    def __init__(self, text, code=255):
        super().__init__(text)
        self.code = code


def say(text):
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def is_utf8(env):
    """Whether the caller's locale is UTF-8; one that the node lacks is complained about as Perl does."""
    names = {name.decode(): value.decode("ascii", "replace") for name, value in env.items()
             if name == b"LANG" or name.startswith(b"LC_")}  # fmt: skip
    wanted = next((names[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if names.get(name)), "C")
    try:
        locale.setlocale(locale.LC_CTYPE, wanted)
    except locale.Error:
        say("perl: warning: Setting locale failed.\nperl: warning: Please check that your locale settings:")
        for name in ["LANGUAGE", "LC_ALL", *sorted(names.keys() - {"LANG", "LC_ALL"}), "LANG"]:
            say(f"\t{name} = " + (f'"{names[name]}"' if name in names else "(unset)") + ("," if name != "LANG" else ""))
        say("    are supported and installed on your system.")
        say('perl: warning: Falling back to the standard locale ("C").')
        return False
    return locale.nl_langinfo(locale.CODESET).upper() == "UTF-8"


def usage_error(command, text):
    raise Die(f"400 {text}\npct {command} {COMMANDS[command][0]}", 2)


def option_error(command, text):
    say(text)
    usage_error(command, "unable to parse option")


def split_options(command, args):
    """(arguments, options as raw bytes): prefixes `--` and `-`, abbreviations, the first `--` ends options."""
    kinds = COMMANDS[command][2]
    positional, options, rest = [], {}, list(args)
    while rest:
        arg = rest.pop(0)
        if arg == b"--":
            return positional + rest, options
        if not arg.startswith(b"-") or arg == b"-":
            positional.append(arg)
            continue
        match = re.match(rb"--?([A-Za-z][\w-]*)(?:=(.*))?$", arg, re.S)
        name = match.group(1).decode() if match else arg.lstrip(b"-").decode(errors="replace")
        fits = [kind for kind in kinds if kind.lower() == name.lower()]
        fits = fits or [kind for kind in kinds if kind.lower().startswith(name.lower())]
        if not match or not fits:
            option_error(command, f"Unknown option: {name.lower()}")
        if len(fits) > 1:
            option_error(command, f"Option {name} is ambiguous")
        value = match.group(2)
        if value is None and kinds[fits[0]] == "bool":
            value = rest.pop(0) if rest and not rest[0].startswith(b"-") else b""
        elif value is None:
            if not rest:
                option_error(command, f"Option {name} requires an argument")
            value = rest.pop(0)
        options[fits[0]] = value
    return positional, options


def parse(command, args, utf8):
    """{name: value} of arguments and options. Without a UTF-8 locale every byte past ASCII becomes U+FFFD."""

    def text(raw):
        return raw.decode("utf-8" if utf8 else "ascii", "replace")

    _usage, names, kinds = COMMANDS[command]
    positional, options = split_options(command, args)
    values = {name: text(raw) for name, raw in options.items()}
    if "extra-args" in names:
        values["extra-args"] = [raw if utf8 else text(raw).encode() for raw in positional[1:]]
        names, positional = ["vmid"], positional[:1]
    if len(positional) < len(names):
        usage_error(command, "not enough arguments")
    if len(positional) > len(names):
        usage_error(command, "too many arguments")
    values.update(zip(names, map(text, positional), strict=True))
    for name, kind in {**kinds, "vmid": "int"}.items():
        if name in values and kind == "bool":
            if values[name].lower() not in BOOLEANS:
                usage_error(command, "unable to parse boolean option")
            values[name] = BOOLEANS[values[name].lower()]
        elif name in values and kind == "int" and not re.fullmatch(r"-?\d+", values[name]):
            why = f"{name}: type check ('integer') failed - got '{values[name]}'"
            usage_error(command, f"Parameter verification failed.\n{why}")
    if "vmid" in values and not 100 <= int(values["vmid"]) <= 999999999:
        why = "vmid: invalid format - value does not look like a valid VM ID\n"
        usage_error(command, f"Parameter verification failed.\n{why}")
    return values
