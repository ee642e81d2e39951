"""The hybrid pair: a Qwen3.5 target with Gated DeltaNet and full attention, and its DFlash drafter, 2.8 M parameters.

It is trained by the stages of the tiny pair.
"""

from training import tiny
from training.hybrid.settings import HybridSettings

# It is evaluated with the tiny pair's prompts.
STAGES = {name: stage for name, stage in tiny.STAGES.items() if name != "prompts"}

add_arguments = tiny.add_arguments
make_settings = HybridSettings.from_arguments
