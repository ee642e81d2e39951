"""SmolLM2-135M-Instruct and a DFlash drafter for it."""
