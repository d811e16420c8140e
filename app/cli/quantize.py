"""``vtserve quantize``: turn a GGUF file or a 16-bit model into a ModelOpt NVFP4 checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from app.cli.options import Flag, HelpfulCommand, WholeNumber

EPILOG = """\b
Examples:
  vtserve quantize --model model.Q8_0.gguf --out model-NVFP4
  vtserve quantize --model org/model --out model-NVFP4 --calibration text.txt
"""


@click.command(cls=HelpfulCommand, epilog=EPILOG)
@click.option(
    "--model",
    cls=Flag,
    group="Model",
    common=True,
    required=True,
    metavar="SRC",
    help="GGUF file, checkpoint directory or Hub id; BF16, FP16 or FP32.",
)
@click.option(
    "--out",
    cls=Flag,
    group="Model",
    common=True,
    required=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Directory to make.",
)
@click.option(
    "--calibration",
    cls=Flag,
    group="Model",
    common=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    default_text="none",
    help="Text the model should do well on; its first 4,096 tokens are used.",
)
@click.option(
    "--force", cls=Flag, group="Model", common=True, is_flag=True, help="Replace the checkpoint in --out."
)
@click.option(
    "--threads",
    cls=Flag,
    group="Model",
    type=WholeNumber(min=1),
    metavar="N",
    default_text="all cores",
    help="CPU threads of the calibration pass.",
)
def quantize(model: str, out: Path, calibration: Path | None, force: bool, threads: int | None) -> None:
    """Turn a GGUF file or a 16-bit model into NVFP4, in ModelOpt's format."""
    from app.cli.progress import ProgressBar
    from app.cli.text_file import read_text
    from engine.errors import ConfigurationError
    from engine.memory.errors import describe_bytes
    from engine.model.checkpoint import resolve_model
    from engine.quantizer.quantize import quantize_model

    text = None if calibration is None else read_text("--calibration", calibration)
    source = Path(model)
    if source.suffix == ".gguf" and not source.exists():
        raise ConfigurationError(f"--model {model}: no such file")
    if not source.is_file():
        source = resolve_model(model)
    with ProgressBar(sys.stderr) as progress:
        report = quantize_model(
            source, out, calibration=text, force=force, threads=threads, progress=progress
        )
    bits = 8 * report.nbytes / report.parameters
    click.echo(
        f"{report.out}: {len(report.quantized)} linears in NVFP4, "
        f"{describe_bytes(report.nbytes)}, {bits:.2f} bits a weight"
    )
    if report.calibration_tokens:
        click.echo(f"calibrated on {report.calibration_tokens:,} tokens")
    for module in report.excluded:
        click.echo(f"kept in BF16: {module} (input features are no multiple of 16)")
