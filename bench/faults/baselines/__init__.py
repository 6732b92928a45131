"""What other tools answer on the same unmodified cases: one file per tool.

Each file is run in place of Python: `python -m bench.faults.baselines.hf_debug CLAIM.json train.py [ARGS...]`. It
installs its tool as a user would, runs the script, and leaves the tool's answer in CLAIM.json.
"""
