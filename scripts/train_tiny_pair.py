"""Train the tiny pair, a Qwen3 target and its DFlash drafter, 4 M parameters, on the standard library.

    python3 scripts/train_tiny_pair.py --device cuda --report report    # about 8 minutes on one H100
    python3 scripts/train_tiny_pair.py --device cpu --smoke --out /tmp/smoke/pair --work /tmp/smoke/work
    python3 scripts/train_tiny_pair.py --stage eval --device cpu    # acceptance of the shipped pair

Stages: corpus, target, generate, drafter, eval, report. Each leaves a marker in --work and is then skipped
(`--stage NAME` runs one again); a training that was cut off goes on from its last checkpoint.
"""

import argparse
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from tiny_pair import corpus, drafter, report, target  # noqa: E402
from tiny_pair.settings import Settings  # noqa: E402

STAGES = {
    "corpus": corpus.run,
    "target": target.run_training,
    "generate": target.run_generation,
    "drafter": drafter.run,
    "eval": report.run_evaluation,
    "report": report.run_report,
}


def main() -> None:
    """Run all stages that are not done yet, or the one that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=["all", *STAGES], default="all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=REPO / "sglang_dflash" / "tiny_pair", help="the pair itself")
    parser.add_argument("--work", type=Path, default=Path("/tmp/tiny_pair_work"), help="intermediates and markers")
    parser.add_argument("--report", type=Path, help="summary, losses, picture, pair.tar (default: WORK/report)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to walk through every stage")
    parser.add_argument("--target-steps", type=int)
    parser.add_argument("--target-seconds", type=float, help="upper bound of the target's training time")
    parser.add_argument("--generation-seconds", type=float, help="upper bound of the generation time")
    parser.add_argument("--drafter-steps", type=int)
    parser.add_argument("--drafter-seconds", type=float, help="upper bound of the drafter's training time")
    settings = make_settings(parser.parse_args())

    started = time.monotonic()
    stage_name = parser.parse_args().stage
    for name, stage in STAGES.items():
        marker = settings.work / f"{name}.done"
        if stage_name == name or (stage_name == "all" and not marker.exists()):
            stage(settings)
            marker.touch()
            print(f"[{time.monotonic() - started:.0f} s] {name} done", flush=True)


def make_settings(args: argparse.Namespace) -> Settings:
    """Settings from the command line; creates the folders."""
    settings = Settings(args.work, args.out, args.report or args.work / "report", args.device, args.seed)
    if args.smoke:
        settings.shrink_for_smoke()
    settings.target.steps = args.target_steps or settings.target.steps
    settings.target.max_seconds = args.target_seconds or settings.target.max_seconds
    settings.generation_seconds = args.generation_seconds or settings.generation_seconds
    settings.drafter.steps = args.drafter_steps or settings.drafter.steps
    settings.drafter.max_seconds = args.drafter_seconds or settings.drafter.max_seconds
    settings.work.mkdir(parents=True, exist_ok=True)
    settings.out.mkdir(parents=True, exist_ok=True)
    return settings


if __name__ == "__main__":
    main()
