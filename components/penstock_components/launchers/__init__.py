"""Programs that run inside the components image: `python -m penstock_components.launchers.<name>`."""
