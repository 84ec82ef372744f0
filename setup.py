"""Copies the top-level folders that the package reads into a wheel.

Everything else is in pyproject.toml.
"""

from pathlib import Path
from shutil import copytree

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = ("configs", "requirements", "slurm")


class BuildWithFolders(build_py):
    """An editable install reads them from the checkout."""

    def run(self) -> None:
        """Builds the package, then adds the folders."""
        super().run()
        if not self.editable_mode:
            for name in FOLDERS:
                copytree(name, Path(self.build_lib, "pacs_megatron", name), dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildWithFolders})
