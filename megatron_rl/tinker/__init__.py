"""Tinker's interface (--stage serve): clients train and sample with loops of their own.

A request comes to the front (`front.py`, in the sidecar's process), which answers at once with a future. What trains or
moves weights becomes work for the ranks (`work.py`), which take it one piece at a time (`worker.py`). What samples goes
to the engines (`sampling.py`). No run of another stage imports any of this.
"""

KEY_FILE, ADDRESS_FILE = "serve-key", "serve-address"
"""The files of a service's folder with the key that it made, and with the address of the interface."""
