from torch import nn


class Classifier(nn.Module):
    def __init__(self, words, classes, width):
        super().__init__()
        self.embed = nn.Embedding(words, width, padding_idx=0)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids, mask, labels=None):
        x = self.embed(input_ids)
        x = self.norm(x + self.attend(x, x, x, key_padding_mask=~mask, need_weights=False)[0])
        logits = self.head((x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}
