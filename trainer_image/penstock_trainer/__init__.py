"""What runs on the accelerators: launcher, engines, model, checkpoints."""
