"""The demo's networks, their baselines, and how they learn."""
