"""Runs a script as it is, then prints a hash of the model that it trained.

python run_and_hash.py SCRIPT ARGUMENTS
"""

import hashlib
import runpy
import sys

import keras

_models = []
_fit = keras.Model.fit


def fit(model, *arguments, **keywords):
    _models.append(model)
    return _fit(model, *arguments, **keywords)


def main():
    keras.Model.fit = fit
    sys.argv = sys.argv[1:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise
    digest = hashlib.sha256()
    for weight in _models[-1].get_weights():
        # Seeds belong to their replica.
        if weight.dtype.kind == "f":
            digest.update(weight.tobytes())
    print(f"weights {digest.hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
