"""Prints what examples/mnist.py has written to mnist.jsonl, and draws it.

python examples/plot_mnist.py
"""

import json
import pathlib

import matplotlib.pyplot as plt


def main():
    lines = pathlib.Path("mnist.jsonl").read_text().splitlines()
    print("run         accuracy  seconds  rounds  megabytes sent per replica")
    for run in map(json.loads, lines):
        name = f"period {run['period']}" if run["period"] else "one device"
        accuracy, rounds = run["accuracy"], run["rounds"]
        sent = rounds * run["megabytes_per_round"]
        print(
            f"{name:12}{accuracy[-1]:.3f}{run['seconds']:11.1f}{rounds:8}"
            f"{sent:11.2f}"
        )
        epochs = range(1, len(accuracy) + 1)
        by_epoch = [sent * epoch / len(accuracy) for epoch in epochs]
        plt.plot(by_epoch, accuracy, "o-", label=name)
    plt.xlabel("megabytes that each replica sends, one dot an epoch")
    plt.ylabel("test accuracy")
    plt.legend()
    plt.savefig("mnist.png", dpi=150)
    print("\nmnist.png shows the accuracies.")


if __name__ == "__main__":
    main()
