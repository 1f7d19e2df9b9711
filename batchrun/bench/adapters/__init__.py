"""One file for each engine, with a class `Engine`; `worker.py` serves one of them to the bench.

They are executed by path, in whatever interpreter has the engine, and import nothing of batchrun but what they serve.
"""
