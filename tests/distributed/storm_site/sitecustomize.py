"""Run by every interpreter whose PYTHONPATH begins with this directory, before its program: see storm_ranks.py."""

import os

if "STORM" in os.environ:
    from distributed.storm_ranks import install

    install()
