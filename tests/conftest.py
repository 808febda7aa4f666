"""Before torch is imported: one thread a worker, and no spinning, or parallel tests slow each other a hundredfold."""
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # tests compare bits, and are of the CPU; bench/gpu.py is of the GPU
