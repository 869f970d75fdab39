"""The loop of ddp.py, with the processes and devices left to Hugging Face Accelerate (pip install accelerate).

accelerate launch --num_processes 2 examples/with_accelerate.py
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from ddp import Network, Process, train


def main() -> None:
    accelerator = Accelerator()
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    model, optimizer = accelerator.prepare(network, optimizer)
    group = dist.group.WORLD if accelerator.num_processes > 1 else None
    process = Process(accelerator.process_index, accelerator.num_processes, accelerator.device, group)
    train(model, accelerator.unwrap_model(model), optimizer, accelerator.backward, process)
    accelerator.end_training()


if __name__ == "__main__":
    main()
