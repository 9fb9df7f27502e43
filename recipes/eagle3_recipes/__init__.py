"""What run_ablations.py is made of: reading sweeps, planning and executing their runs, collecting, tables, plots.

Training and evaluation are subprocesses, `train/train_draft.py` and `eagle3-infer`; of eagle3_train and eagle3_infer
only the settings are read here, so that a wrong one shows before anything runs.
"""
