from dataclasses import dataclass

configs = [
    dict(name="pico", n_layer=1, n_head=2, n_embd=16),
    dict(name="nano", n_layer=2, n_head=4, n_embd=24),
]
name_to_config = {config["name"]: config for config in configs}


@dataclass
class Config:
    name: str = ""
    block_size: int = 8
    vocab_size: int = 17
    n_layer: int = 1
    n_head: int = 2
    n_embd: int = 16

    @classmethod
    def from_name(cls, name, **kwargs):
        return cls(**{**name_to_config[name], **kwargs})
