"""`zftune checkpoint`: from DeepSpeed's ZeRO or a plain AdamW to ours, and from ours to a plain AdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from zftune.errors import ZftuneError
from zftune.text import STANDARD_OUTPUT, check_output_path, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from zftune.checkpoint.converting import Converted

checkpoint = typer.Typer(
    name="checkpoint",
    help="Convert a checkpoint of DeepSpeed's ZeRO or torch's AdamW for this runtime, or one of ours for AdamW.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_From = Annotated[str, typer.Argument(metavar="FROM", help="A checkpoint: a file or a folder.", show_default=False)]
_Output = Annotated[str, typer.Option("--output", "-o", metavar="TO", help="Where nothing is yet.")]
_Trust = Annotated[bool, typer.Option("--trust", help="Let code in the files run: for objects of other packages.")]
_Json = Annotated[str | None, typer.Option("--json", metavar="PATH", help="Write JSON; '-': standard output.")]
_FORMS = {"ours": "a checkpoint of zftune", "zero": "a checkpoint of ZeRO", "plain": "a plain checkpoint"}


@checkpoint.command("import")
def import_(
    source: _From,
    output: _Output,
    ds_config: Annotated[
        str | None,
        typer.Option("--ds-config", metavar="FILE", help="Whose clipping the first step has; else that of FROM."),
    ] = None,
    trust: _Trust = False,
    json_path: _Json = None,
) -> None:
    """Make a checkpoint of ours from a folder of ZeRO-1 or ZeRO-2, or a file {"model", "optimizer"} of torch's AdamW.

    TO is such a file where it ends in .pt, else a folder that DeepSpeed's engine loads under `zftune run`. What else
    a file holds, such as a scheduler's state, is copied; other files of a folder are not.
    """
    check_output_path(json_path)

    def convert() -> Converted:
        from zftune.checkpoint.converting import import_checkpoint

        return import_checkpoint(source, output, ds_config=ds_config, trust=trust)

    _report(convert, json_path)


@checkpoint.command()
def export(
    source: _From,
    output: _Output,
    model: Annotated[
        str | None, typer.Option(metavar="FILE", help="The model's state_dict, where FROM has only the optimizer's.")
    ] = None,
    trust: _Trust = False,
    json_path: _Json = None,
) -> None:
    """Make a plain checkpoint from one of ours; pending updates are applied.

    Plain is a file {"model": fp32 masters by name, "optimizer": a state_dict of torch.optim.AdamW}, with what else a
    file FROM holds.
    """
    check_output_path(json_path)

    def convert() -> Converted:
        from zftune.checkpoint.converting import export_checkpoint

        return export_checkpoint(source, output, model=model, trust=trust)

    _report(convert, json_path)


def _report(convert: Callable[[], Converted], json_path: str | None) -> None:
    from rich.console import Console

    to_stderr = json_path == STANDARD_OUTPUT
    try:
        with Console(stderr=True).status("converting"):
            done = convert()
    except MemoryError as error:
        raise ZftuneError("the checkpoint does not fit into memory, which has to hold it about twice") from error
    plural = "" if done.groups == 1 else "s"
    typer.echo(
        f"{done.target}: {_FORMS[done.target_form]}, made from {_FORMS[done.source_form]}. "
        f"{done.weights} weights of {done.elements:,} elements in {done.groups} group{plural}, rule {done.rule}, "
        f"after {done.steps} steps.",
        err=to_stderr,
    )
    if done.copied:
        typer.echo(f"Copied unchanged: {', '.join(done.copied)}.", err=to_stderr)
    for note in done.notes:
        typer.echo(f"note: {note}", err=True)
    write_json(done.document(), json_path)
