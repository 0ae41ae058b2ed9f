"""Hooks of MkDocs: what `make docs` adds to the site, and what it refuses."""

import pathlib
import re

import griffe
from mkdocs import exceptions
from mkdocs.structure import files as site_files
from pygments import formatters

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = "tf_avgstrategy"

# Hooks that Keras documents. An override of them need not say it again.
_KERAS_HOOK = re.compile(
    r"on_(train|test|predict|epoch|batch)(_batch)?_(begin|end)|set_model"
)
# What a browser fetches by itself, unlike a link, which a reader follows.
_FETCHED = re.compile(
    r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//"
)
_FETCHED_BY_STYLE = re.compile(
    r"(?:url\(\s*[\"']?|@import\s+[\"'])(?:https?:)?//"
)


class Sections(griffe.Extension):
    """Makes what Griffe shows as a section of "Example" in docstrings."""

    def on_instance(self, *, obj, **kwargs):
        """Renames the section before the docstring is parsed."""
        if obj.docstring is None:
            return
        text = obj.docstring.value
        # A section is indented. Code between fences is not.
        text = re.sub(r"^Example:\n(?= )", "Examples:\n", text, flags=re.M)
        text = re.sub(r"^Example:$", "**Example:**", text, flags=re.M)
        obj.docstring.value = text


def on_pre_build(config):
    """Refuses public names without a docstring."""
    del config
    package = griffe.load(PACKAGE, search_paths=[str(ROOT)])
    missing = list(undocumented(package))
    if missing:
        raise exceptions.Abort(
            "Every public name, method and property needs a docstring. "
            f"Received none of: {', '.join(missing)}. Add one to each."
        )


def on_files(files, config):
    """Adds the changelog, and the colors of code in light and dark."""
    files.append(
        site_files.File.generated(
            config, "changelog.md", abs_src_path=str(ROOT / "CHANGELOG.md")
        )
    )
    colors = "\n".join(
        formatters.HtmlFormatter(style=style, nobackground=True).get_style_defs(
            f'[data-bs-theme="{mode}"] .highlight'
        )
        for mode, style in (("light", "default"), ("dark", "github-dark"))
    )
    files.append(
        site_files.File.generated(config, "highlighting.css", content=colors)
    )
    return files


def on_post_build(config):
    """Refuses pages and styles that fetch something from the network."""
    site = pathlib.Path(config.site_dir)
    patterns = {"*.html": _FETCHED, "*.css": _FETCHED_BY_STYLE}
    for glob, pattern in patterns.items():
        for path in sorted(site.rglob(glob)):
            found = pattern.search(path.read_text())
            if found is not None:
                raise exceptions.Abort(
                    "A page must fetch nothing from the network. Received: "
                    f"{found[0]!r} in {path}. Put the file into `docs/`."
                )


def undocumented(package):
    """Yields the paths of public names and members without a docstring.

    Args:
        package: `griffe.Module` of the package. Its names are those of its
            `__all__`, wherever they are defined.
    """
    for name in package.exports:
        member = package[name]
        if name.startswith("__"):
            continue
        if member.is_module:
            yield from _undocumented_members(member, member.exports)
        else:
            yield from _undocumented(member)


def _undocumented(member):
    if not member.has_docstring:
        yield member.path
    if member.is_class:
        names = [n for n in member.members if not n.startswith("_")]
        yield from _undocumented_members(member, names)


def _undocumented_members(parent, names):
    for name in names:
        member = parent.members[name]
        is_checked = (
            member.is_function or member.is_class or _is_property(member)
        )
        if is_checked and not _is_known_override(parent, name):
            yield from _undocumented(member)


def _is_property(member):
    return member.is_attribute and "property" in member.labels


def _is_known_override(parent, name):
    """Whether a class documents this member through one that it extends."""
    if not parent.is_class:
        return False
    if _KERAS_HOOK.fullmatch(name):
        return True
    return any(
        name in base.members and base.members[name].has_docstring
        for base in parent.mro()
    )
