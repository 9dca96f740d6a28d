"""A small image classifier: deepspeed --num_gpus 2 examples/not_a_language_model.py.

Any module, any data, any loss: features of our own make the plan, `loss_fn` gives one loss a sample. The data are
scikit-learn's 1,797 handwritten digits; the features are the last layer's gradient proxies of a briefly trained model.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cluster_ds

CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
}


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(),
            torch.nn.Linear(256, 64), torch.nn.ReLU(),
        )
        self.head = torch.nn.Linear(64, 10)

    def forward(self, image):
        return self.head(self.body(image))


def loss_fn(outputs, batch):
    return F.cross_entropy(outputs, batch["label"], reduction="none")  # one loss a sample


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    model, number = Classifier(), 1400  # the rest is held out
    dataset = [{"id": f"digit-{i}", "image": images[i], "label": labels[i]} for i in range(number)]

    brief = torch.optim.AdamW(model.parameters(), lr=3e-3)  # a first impression of the data, as a pretrained model has one
    for rows in torch.randperm(number)[:640].split(32):
        brief.zero_grad()
        F.cross_entropy(model(images[rows]), labels[rows]).backward()
        brief.step()
    with torch.no_grad():
        hidden = model.body(images[:number])
        sure = model.head(hidden).softmax(dim=1)[torch.arange(number), labels[:number]]
        features = ((sure - 1)[:, None] * hidden).numpy()

    ones = np.ones(number, dtype=int)
    plan = cluster_ds.make_plan(
        features, [s["id"] for s in dataset], ones, num_supervised_tokens=ones, num_clusters=4, ratio=0.75, min_fraction=0.5
    )
    engine, _, loader, _ = cluster_ds.initialize(
        model=model, config=CONFIG, dataset=dataset, plan=plan, epochs=3, loss_fn=loss_fn
    )
    for batch in loader:
        engine.backward(engine(batch))
        engine.step()
    if int(os.environ["RANK"]) == 0:
        with torch.no_grad():
            right = (model(images[number:]).argmax(dim=1) == labels[number:]).float().mean()
        print(*plan.lines(), sep="\n")
        print(f"last step's loss {engine.last_loss:.3f}; {right:.1%} of {len(images) - number} held-out digits are right")


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()  # its threads must not outlive Python
