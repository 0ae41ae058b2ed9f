"""What users may call, with its arguments, is what `public_api.txt` says.

A change is one for the changelog. `python tests/test_public_api.py` writes the
file anew.
"""

import inspect
import pathlib

import tf_avgstrategy

FILE = pathlib.Path(__file__).with_name("public_api.txt")


def public_api():
    """One line for each name, class with its methods and properties."""
    lines = []
    for name in sorted(tf_avgstrategy.__all__):
        value = getattr(tf_avgstrategy, name)
        if inspect.ismodule(value):
            for own in sorted(vars(value)):
                member = vars(value)[own]
                if inspect.isfunction(member) and not own.startswith("_"):
                    lines.append(f"{name}.{own}{inspect.signature(member)}")
        elif inspect.isclass(value):
            lines.append(f"{name}{inspect.signature(value)}")
            lines += _members(name, value)
        elif inspect.isfunction(value):
            lines.append(f"{name}{inspect.signature(value)}")
    return "\n".join(lines) + "\n"


def _members(name, kind):
    own = [
        base for base in kind.__mro__ if base.__module__.startswith("tf_avg")
    ]
    members = {}
    for base in reversed(own):
        members.update(vars(base))
    for member in sorted(members):
        value = members[member]
        if member.startswith("_"):
            continue
        if isinstance(value, property):
            yield f"{name}.{member}"
        elif isinstance(value, (classmethod, staticmethod)):
            yield f"{name}.{member}{inspect.signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f"{name}.{member}{inspect.signature(value)}"


def test_public_api():
    assert public_api() == FILE.read_text()


if __name__ == "__main__":
    FILE.write_text(public_api())
