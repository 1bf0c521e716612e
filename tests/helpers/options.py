"""A configuration from a command line and from a file, as tests of either read it."""

import tempfile
from pathlib import Path

import click
from hypothesis import strategies as st

from hvdtrain.base.config.file import read_config
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.runs.request import train_options

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]))


@click.command()
@train_options()
def command(**options):
    return RunConfig(**options)


def from_args(args):
    return command.main(args, standalone_mode=False)


def in_file(text):
    """read_config of a file that holds this text or these bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.toml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return read_config(path)
