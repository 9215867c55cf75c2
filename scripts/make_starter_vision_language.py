"""Make the shipped vision-language backbone: the shipped ViT and Llama with a projector between them, 7.5 M parameters.

    python scripts/make_starter_vision_language.py OUT

It trains on generated scenes of coloured shapes alone. First the ViT learns to name the shape and the colour of scenes
with one shape; then the whole learns to answer questions about form, colour, number and place, and to describe. What it
writes is a stock LLaVA checkpoint in bfloat16 with its processor.

Legend: B rows of a batch, P patches, D width of the ViT.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.nn import functional as F
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerBase,
    ViTConfig,
    ViTImageProcessorPil,
    ViTModel,
)

from workbench.data import starter

SIZE, PATCH, BLOCKS = 64, 16, 4
"""Side of a picture and of a patch in pixels, and blocks of the ViT that are kept of six. A picture has 16 tokens: four
patches of the shipped ViT are read as one."""
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<image>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- eos_token if message.role == 'assistant' }}
{%- endfor %}
{{- '<|assistant|>' if add_generation_prompt }}"""
COLOURS = {
    "red": (230, 25, 25),
    "green": (20, 200, 30),
    "blue": (25, 40, 230),
    "yellow": (245, 235, 20),
    "black": (15, 15, 15),
    "gray": (128, 128, 128),
    "brown": (150, 50, 35),
    "teal": (10, 128, 128),
    "purple": (130, 30, 160),
    "orange": (250, 140, 10),
    "pink": (250, 130, 190),
}
SHAPES = ("circle", "rectangle", "triangle", "star", "cross")
NUMBERS = ("zero", "one", "two", "three")


class Shape(NamedTuple):
    """What stands in a scene."""

    name: str
    colour: str
    place: str


class Scene(NamedTuple):
    """A picture, and what stands in it."""

    picture: Image.Image
    shapes: list[Shape]


def scene(random: np.random.Generator, *, most: int) -> Scene:
    """Draw one shape anywhere, or up to `most` (three) in quarters of their own."""
    tint = random.integers(215, 256, 3)
    picture = Image.new("RGB", (4 * SIZE, 4 * SIZE), tuple(tint.tolist()))
    draw = ImageDraw.Draw(picture)
    count = 1 if random.random() < 0.7 else int(random.integers(1, most + 1))
    room = 2 * SIZE if count > 1 else 4 * SIZE
    shapes: list[Shape] = []
    for quarter in random.permutation(4)[:count]:
        name, colour = str(random.choice(SHAPES)), str(random.choice(list(COLOURS)))
        side = int(random.integers(34, 112 if count > 1 else 150))
        other = int(side * random.uniform(0.5, 1)) if name == "rectangle" else side
        wide, tall = (side, other) if random.random() < 0.5 else (other, side)
        left = int(random.integers(0, room - wide + 1)) + (quarter % 2) * room * (count > 1)
        top = int(random.integers(0, room - tall + 1)) + (quarter // 2) * room * (count > 1)
        shade = np.clip(np.asarray(COLOURS[colour]) + random.integers(-30, 31, 3), 0, 255)
        draw_shape(draw, name, (left, top, left + wide, top + tall), tuple(shade.tolist()))
        x, y = left + wide / 2, top + tall / 2
        place = f"{'top' if y < 2 * SIZE else 'bottom'} {'left' if x < 2 * SIZE else 'right'}"
        shapes.append(Shape(name, colour, place))
    return Scene(picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR), shapes)


def draw_shape(draw: ImageDraw.ImageDraw, name: str, box: tuple[int, int, int, int], colour: tuple[int, ...]) -> None:
    """Draw a filled shape into a box (left, top, right, bottom)."""
    left, top, right, bottom = box
    x, y, a, b = (left + right) / 2, (top + bottom) / 2, (right - left) / 2, (bottom - top) / 2
    if name == "circle":
        draw.ellipse(box, fill=colour)
    elif name in ("square", "rectangle"):
        draw.rectangle(box, fill=colour)
    elif name == "triangle":
        draw.polygon([(left, bottom), (right, bottom), (x, top)], fill=colour)
    elif name == "star":
        angles = np.pi * (np.arange(10) / 5 - 0.5)
        reach = np.where(np.arange(10) % 2 == 0, 1.0, 0.4)
        points = zip(x + a * reach * np.cos(angles), y + b * reach * np.sin(angles), strict=True)
        draw.polygon([(float(u), float(v)) for u, v in points], fill=colour)
    else:
        draw.rectangle((x - a / 3, top, x + a / 3, bottom), fill=colour)
        draw.rectangle((left, y - b / 3, right, y + b / 3), fill=colour)


def question(shapes: Sequence[Shape], random: np.random.Generator) -> tuple[str, str]:
    """A question about a scene, and its answer."""
    names, colours = [each.name for each in shapes], [each.colour for each in shapes]
    told = " and ".join(f"a {colour} {name} at the {place}" for name, colour, place in shapes)
    asked = [("describe the picture.", told), ("how many shapes do you see?", NUMBERS[len(shapes)])]
    for name, colour, place in shapes:
        if names.count(name) == 1:
            asked += [(f"which color has the {name}?", colour), (f"where is the {name}?", place)]
        if colours.count(colour) == 1:
            asked += [(f"which shape is {colour}?", name), (f"where is the {colour} thing?", place)]
    if len(shapes) == 1:
        asked += [("which shape do you see?", names[0]), ("which color do you see?", colours[0])]
    for known, every, article in ((names, SHAPES, "a"), (colours, tuple(COLOURS), "something")):
        there = str(random.choice(known))
        missing = str(random.choice([each for each in every if each not in known]))
        asked += [(f"do you see {article} {there}?", "yes"), (f"do you see {article} {missing}?", "no")]
        asked += [(f"do you miss {article} {there}?", "no"), (f"do you miss {article} {missing}?", "yes")]
    return asked[int(random.integers(len(asked)))]


def assembled() -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """The shipped parts with a projector of random values, and the processor of the whole."""
    tokenizer = AutoTokenizer.from_pretrained(starter.FOLDER)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = TEMPLATE
    vision = ViTConfig.from_pretrained(starter.FOLDER / "vision")
    vision.num_hidden_layers, vision.patch_size = BLOCKS, PATCH
    for name in ("id2label", "label2id"):
        vision.__dict__.pop(name, None)
    text = LlamaConfig.from_pretrained(starter.FOLDER)
    text.vocab_size = len(tokenizer)
    config = LlavaConfig(
        vision_config=vision.to_dict(),
        text_config=text.to_dict(),
        image_token_index=len(tokenizer) - 1,
        image_seq_length=(SIZE // PATCH) ** 2,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    tower = of_larger_patches(ViTModel.from_pretrained(starter.FOLDER / "vision", dtype=torch.float32), vision)
    llama = LlamaForCausalLM.from_pretrained(starter.FOLDER, dtype=torch.float32)
    llama.resize_token_embeddings(len(tokenizer))
    model.model.vision_tower = tower
    model.model.language_model = llama.model
    model.tie_weights()
    model.float()
    mean = [0.5] * 3
    pixels = ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}, image_mean=mean, image_std=mean)
    processor = LlavaProcessor(
        pixels,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    return model, processor


def of_larger_patches(known: ViTModel, config: ViTConfig) -> ViTModel:
    """The first blocks of a ViT, which reads larger patches as if the picture were that much smaller."""
    tower = ViTModel(config)
    state = known.state_dict()
    filters, places = state["embeddings.patch_embeddings.projection.weight"], state["embeddings.position_embeddings"]
    wider = F.interpolate(filters, size=(PATCH, PATCH), mode="bilinear")
    state["embeddings.patch_embeddings.projection.weight"] = wider * (filters.shape[-1] / PATCH) ** 2
    side = int((places.shape[1] - 1) ** 0.5)
    grid = places[:, 1:].view(1, side, side, -1).permute(0, 3, 1, 2)
    smaller = F.interpolate(grid, size=(SIZE // PATCH,) * 2, mode="area").flatten(2).transpose(1, 2)
    state["embeddings.position_embeddings"] = torch.cat([places[:, :1], smaller], dim=1)
    state["pooler.dense.weight"].zero_()  # nothing reads it
    tower.load_state_dict({name: state[name] for name in tower.state_dict()})
    return tower


def pixels(scenes: Sequence[Scene], processor: LlavaProcessor) -> torch.Tensor:
    """Pictures as the tower reads them, (B, 3, SIZE, SIZE)."""
    picked: torch.Tensor = processor.image_processor([each.picture for each in scenes], return_tensors="pt")[
        "pixel_values"
    ]
    return picked


def encoded(scenes: Sequence[Scene], random: np.random.Generator, processor: LlavaProcessor) -> dict[str, torch.Tensor]:
    """Scenes (B) with a question each as one batch, and labels at the tokens of answers."""
    tokenizer: PreTrainedTokenizerBase = processor.tokenizer
    ids, labels = [], []
    for _, shapes in scenes:
        asked, answer = question(shapes, random)
        prompt = f"<|user|>{'<image>' * (SIZE // PATCH) ** 2}{asked}<|assistant|>"
        given, learnt = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, answer))
        learnt = [*learnt, tokenizer.eos_token_id]
        ids.append(torch.tensor([*given, *learnt]))
        labels.append(torch.tensor([-100] * len(given) + learnt))
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(ids, batch_first=True, padding_value=tokenizer.pad_token_id),
        "labels": pad(labels, batch_first=True, padding_value=-100),
        "pixel_values": pixels(scenes, processor),
    }


def optimizer_of(
    modules: Sequence[tuple[torch.nn.Module, float]], steps: int
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW with a learning rate for each module, and its linear schedule."""
    groups = [{"params": list(module.parameters()), "lr": rate} for module, rate in modules]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, step / 50) * max(0.02, 1 - step / steps)
    )
    return optimizer, schedule


def learn_to_see(
    tower: ViTModel, processor: LlavaProcessor, random: np.random.Generator, *, steps: int, batch: int
) -> None:
    """Train the tower to name shape and colour by the mean of its patches, with heads that are thrown away."""
    head = torch.nn.Linear(tower.config.hidden_size, len(SHAPES) + len(COLOURS))
    optimizer, schedule = optimizer_of([(tower, 1e-3), (head, 1e-2)], steps)
    colours = list(COLOURS)
    losses, right, began = [], [], time.monotonic()
    for step in range(1, steps + 1):
        scenes = [scene(random, most=1) for _ in range(batch)]
        with torch.autocast("cpu", torch.bfloat16):
            patches_BPD = tower(pixels(scenes, processor)).last_hidden_state[:, 1:]
            told = head(patches_BPD.mean(1)).float()
        name_B = torch.tensor([SHAPES.index(each.shapes[0].name) for each in scenes])
        colour_B = torch.tensor([colours.index(each.shapes[0].colour) for each in scenes])
        by_name, by_colour = told.split([len(SHAPES), len(COLOURS)], dim=1)
        loss = F.cross_entropy(by_name, name_B) + F.cross_entropy(by_colour, colour_B)
        take_step(loss, optimizer, schedule)
        losses.append(loss.item())
        right.append(((by_name.argmax(1) == name_B) & (by_colour.argmax(1) == colour_B)).float().mean().item())
        if step % 100 == 0:
            tell("seeing", step, losses, right, began)


def learn_to_name(
    model: LlavaForConditionalGeneration,
    processor: LlavaProcessor,
    random: np.random.Generator,
    *,
    steps: int,
    batch: int,
) -> None:
    """Train the projector alone: the mean of a picture's tokens is to be near the embeddings of the words that name its
    shape and colour, so that the Llama finds there what it would read."""
    tokenizer: PreTrainedTokenizerBase = processor.tokenizer
    parts, words_VD = model.model, model.model.language_model.embed_tokens.weight.detach()
    first = {word: tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in (*SHAPES, *COLOURS)}
    optimizer, schedule = optimizer_of([(parts.multi_modal_projector, 3e-3)], steps)
    losses, right, began = [], [], time.monotonic()
    for step in range(1, steps + 1):
        scenes = [scene(random, most=1) for _ in range(batch)]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            seen = parts.vision_tower(pixels(scenes, processor), output_hidden_states=True).hidden_states[-1][:, 1:]
        told_BV = parts.multi_modal_projector(seen.float()).mean(1) @ words_VD.T
        wanted_B2 = torch.tensor([[first[each.shapes[0].name], first[each.shapes[0].colour]] for each in scenes])
        loss = -told_BV.log_softmax(-1).gather(1, wanted_B2).mean()
        take_step(loss, optimizer, schedule)
        losses.append(loss.item())
        both = told_BV.topk(2).indices.sort().values == wanted_B2.sort().values
        right.append(both.all(1).float().mean().item())
        if step % 100 == 0:
            tell("naming", step, losses, right, began)


def learn_to_answer(
    model: LlavaForConditionalGeneration,
    processor: LlavaProcessor,
    random: np.random.Generator,
    *,
    steps: int,
    batch: int,
) -> None:
    """Train all of it to answer questions about scenes."""
    parts = model.model
    rates = [(parts.vision_tower, 3e-4), (parts.multi_modal_projector, 2e-3), (parts.language_model, 8e-4)]
    optimizer, schedule = optimizer_of(rates, steps)
    losses, right, began = [], [], time.monotonic()
    for step in range(1, steps + 1):
        scenes = [scene(random, most=3) for _ in range(batch)]
        inputs = encoded(scenes, random, processor)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(**inputs)
        take_step(output.loss, optimizer, schedule)
        losses.append(output.loss.item())
        labels = inputs["labels"][:, 1:]
        right.append(((output.logits[:, :-1].argmax(-1) == labels) | (labels == -100)).all(1).float().mean().item())
        if step % 50 == 0:
            tell("answering", step, losses, right, began)


def take_step(loss: torch.Tensor, optimizer: torch.optim.AdamW, schedule: torch.optim.lr_scheduler.LambdaLR) -> None:
    """Move the weights once."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()


def tell(what: str, step: int, losses: Sequence[float], right: Sequence[float], began: float) -> None:
    """Print the means of the last 50 steps."""
    took = time.monotonic() - began
    print(
        f"{what}, step {step}: loss {np.mean(losses[-50:]):.3f}, right {np.mean(right[-50:]):.3f}, {took:.0f} s",
        flush=True,
    )


def main(arguments: argparse.Namespace) -> None:
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    model, processor = assembled()
    model.train()
    learn_to_see(model.model.vision_tower, processor, random, steps=arguments.seeing, batch=arguments.batch)
    learn_to_name(model, processor, random, steps=arguments.naming, batch=arguments.batch)
    learn_to_answer(model, processor, random, steps=arguments.answering, batch=arguments.batch)
    model.bfloat16().save_pretrained(arguments.out)
    processor.save_pretrained(arguments.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeing", type=int, default=4000, help="steps in which the ViT learns alone")
    parser.add_argument("--naming", type=int, default=400, help="steps in which the projector learns alone")
    parser.add_argument("--answering", type=int, default=800, help="steps in which the whole learns")
    parser.add_argument("--batch", type=int, default=32)
    main(parser.parse_args())
