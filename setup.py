"""What pyproject.toml has no words for; everything else is there.

The long description is README.md without relative links, which lead nowhere on a package index. A source distribution
keeps src/mfsdp/passes as the link to passes/ that it is: setuptools copies the files behind it, and who edited one of
the two would wonder.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist

HERE = Path(__file__).parent
PASSES = Path("src", "mfsdp", "passes")


def long_description() -> str:
    """README.md, with the text of a relative link in the link's place, and no pictures.

    docs/guides/supported.md is written as it is called; a link that is called otherwise keeps its target in brackets.
    """
    text = (HERE / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n+", "", text, flags=re.MULTILINE)

    def unlinked(match: re.Match[str]) -> str:
        said, target = match.groups()
        page = target.partition("#")[0]
        return said if said.strip("`") == page or not page else f"{said} ({page})"

    text = re.sub(r"(?<!!)\[([^]]+)\]\((?!https?:)([^)]+)\)", unlinked, text)
    title, _, rest = text.partition("\n\n")
    return f"{title}\n\nPages and files that this text names are in the source distribution.\n\n{rest}"


class Linked(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        shutil.rmtree(Path(base_dir, PASSES))
        os.symlink(os.path.relpath("passes", PASSES.parent), Path(base_dir, PASSES), target_is_directory=True)


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    cmdclass={"sdist": Linked},
)
