"""accelerate launch --config_file default_config.yaml train.py"""
import json

from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

from vision.loop import run
from vision.nets import Generator, make_critic, stripes


def main(size=8, latent=4, epochs=2):
    accelerator = Accelerator(cpu=True)
    set_seed(99)
    generator, critic = Generator(latent, size), make_critic(size)
    g_opt = Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    c_opt = Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    loader = DataLoader(TensorDataset(stripes(50, size)), batch_size=5, shuffle=True)
    generator, critic, g_opt, c_opt, loader = accelerator.prepare(generator, critic, g_opt, c_opt, loader)

    history = run(accelerator, generator, critic, g_opt, c_opt, loader, epochs)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with open("history.json", "w") as f:
            json.dump(history, f)
        accelerator.save(accelerator.get_state_dict(generator), "generator.pt")


if __name__ == "__main__":
    main()
