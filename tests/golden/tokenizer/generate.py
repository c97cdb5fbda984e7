"""Writes the goldens of this folder: texts, small vocabularies, and what Hugging Face makes of them.

    python generate.py [path of SmolLM2-135M-Instruct.Q4_1.gguf]

Needs `tokenizers` and `gguf`; `transformers` for the comparison of the demo model. The pre-tokenizers are those of the
original tokenizer.json files. `tokenizers` for Python runs its regular expressions on another engine than the crate.
"""

import json
import random
import sys
from pathlib import Path

import gguf
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<tool_call>", "</tool_call>"]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def texts():
    """Varied texts: code, emoji, scripts, control characters, white space, digits, contractions, special tokens."""
    fixed = [
        "",
        " ",
        "Hello, world!",
        "  leading and trailing  ",
        "The quick brown fox jumps over the lazy dog. " * 3,
        "I'm sure they've said we'll, he'd, it's, don't, you're; I'M SURE THEY'VE SAID WE'LL.",
        "'s't're've'm'll'd 'S'T'RE'VE'M'LL'D ''s '",
        "def f(x):\n    if x > 10:\n\t\treturn x ** 2  # square\n    return [i for i in range(0x1F)]\n\n\n",
        '#include <stdio.h>\nint main(void) { printf("%d\\n", 1234567890); return 0; }\n',
        '<html>\n  <body class="a b">&nbsp;</body>\r\n</html>\r\n',
        "1 12 123 1234 12345 123456789 3.14159 1e-10 0xDEADBEEF 1,000,000 ٣٤٥ १२३ ⅷ ½ ² x2y3",
        "2024-02-29T23:59:59Z v1.2.3-rc4",
        "tabs\tand\t\ttabs\t\t\tand \t mixed \t  \t",
        "a" + " " * 1 + "b" + " " * 2 + "c" + " " * 5 + "d" + " " * 31 + "e" + " " * 100,
        "\n\n\n\n a \n b \n\n c\r\n\r\n\r\nd\r\re \u00a0\u2003\u3000 f \u2028\u2029 g \u0085 h",
        "   \n   \n\t\n  x",
        "café naïve Ångström — “quotes” … ‘single’ «guillemets» €100 £5 ¥7",
        "e\u0301 a\u030a n\u0303 decomposed; \u1e9b\u0323 \ufb01 \u212b \u2126",
        "日本語のテキスト、中文文本，한국어 텍스트입니다。ｆｕｌｌｗｉｄｔｈ １２３",
        "مرحبا بالعالم، كيف حالك؟ שלום עולם! مَرْحَبًا שָׁלוֹם",
        "नमस्ते दुनिया สวัสดีชาวโลก Привет, мир! Γειά σου Κόσμε İstanbul ǅ",
        "👋🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇯🇵🇺🇳 ❤️ ☎️ 1️⃣ 😀😃😄",
        "\x00\x01\x02\x1b[31mred\x1b[0m\x7f\x80\x9f\u200b\u200d\ufeff\u202e rtl",
        "\ud7ff\ue000\uffff\U00010000\U0010ffff",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "!@#$%^&*()_+-=[]{}|;':\",./<>?`~ !!!! ???? ---- ==== ....",
        "camelCaseIdentifier snake_case_name SCREAMING_CASE kebab-case PascalCase mIxEd CaSe",
        "https://example.com/a/b?c=d&e=%20f#g user@example.org C:\\path\\to\\file ~/x/../y",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        '<|endoftext|><|endoftext|> <|im_end|> <tool_call>{"a": 1}</tool_call> <|im_start',
        "a<|im_end|>b <tool_call> c",
        "x = {'k': [1, 2, 3], \"s\": 'don\\'t'}\nprint(f\"{x!r:>10}\")",
    ]
    chance = random.Random(7)
    alphabet = "abcXYZ 019  \n\t'.,!<|>_-éß中文あ한🙂\u0301\u00a0\u200d\r"
    return fixed + ["".join(chance.choice(alphabet) for _ in range(chance.randint(1, 60))) for _ in range(40)]


def byte_level(use_regex):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=use_regex)


def split(digits):
    regex = Regex(SPLIT.replace("DIGITS", digits))
    return pre_tokenizers.Sequence([pre_tokenizers.Split(regex, "isolated", False), byte_level(False)])


def definitions():
    """Normalizer, pre-tokenizer and whether whole words skip the merges, by GGUF's name."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    return {
        "gpt-2": (None, byte_level(True), False),
        "smollm": (None, pre_tokenizers.Sequence([digits, byte_level(True)]), False),
        "qwen2": (normalizers.NFC(), split(r"\p{N}"), False),
        "llama-bpe": (None, split(r"\p{N}{1,3}"), True),
    }


def trained(name, corpus):
    """A small byte-level BPE."""
    normalizer, pre_tokenizer, ignore_merges = definitions()[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in USER_DEFINED])
    if name == "llama-bpe":
        bos = CONTROL[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def write_gguf(path, name, tokenizer):
    """A model of one layer, too small to say anything, with the tokenizer in its metadata."""
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [text for text, _ in vocab]
    kinds = [3 if text in CONTROL else 4 if text in USER_DEFINED else 1 for text in tokens]
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(f"tiny {name}")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(4)
    writer.add_feed_forward_length(4)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 4), dtype=np.float16))
    writer.add_tensor("output_norm.weight", np.ones(4, dtype=np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((4, 4), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sentencepiece(corpus, metaspace):
    """A BPE in the style of SentencePiece, as converted for Llama 2 or, with `metaspace`, the newer way."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    mark = "\u2581"
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(mark, "first", False)
        tokenizer.decoder = decoders.Sequence([decoders.Metaspace(mark, "first"), decoders.ByteFallback()])
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(mark), normalizers.Replace(" ", mark)])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    specials = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=560, special_tokens=specials, show_progress=False, limit_alphabet=120)
    # Training splits at spaces; encoding need not.
    words = [piece for text in corpus for piece in (mark + text.replace(" ", f" {mark}")).split(" ")]
    trained = Tokenizer(models.BPE())
    trained.train_from_iterator(words, trainer)
    learned = json.loads(trained.to_str())["model"]
    value = json.loads(tokenizer.to_str())
    value["model"] |= {"vocab": learned["vocab"], "merges": learned["merges"]}
    tokenizer = Tokenizer.from_str(json.dumps(value))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def expected(tokenizer, corpus):
    """Ids with and without the tokens that begin a text, and the text that the ids decode to where it is another."""
    plain = [tokenizer.encode(text, add_special_tokens=False).ids for text in corpus]
    special = [tokenizer.encode(text, add_special_tokens=True).ids for text in corpus[:3]]
    decoded = [tokenizer.decode(ids) for ids in plain]
    changed = [None if after == before else after for before, after in zip(corpus, decoded, strict=True)]
    return {"ids": plain, "special": special, "decoded": changed}


def demo(path, corpus):
    """The demo model's vocabulary under SmolLM2's own definition."""
    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = definitions()["smollm"][1]
    tokenizer.decoder = decoders.ByteLevel()
    special = [text for text, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    result = expected(tokenizer, corpus)

    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(Path(path).parent), gguf_file=Path(path).name)
    for text, ids in zip(corpus, result["ids"], strict=True):
        if (other := theirs.encode(text, add_special_tokens=False)) != ids:
            print("transformers differs:", repr(text[:60]), len(ids), len(other))
    return {"ids": result["ids"]}


def main():
    corpus = texts()
    (HERE / "texts.json").write_text(json.dumps(corpus))
    for name in definitions():
        tokenizer = trained(name, corpus)
        compact = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
        (HERE / f"{name}.json").write_text(compact)
        write_gguf(HERE / f"{name}.gguf", name, tokenizer)
        (HERE / f"{name}.expected.json").write_text(json.dumps(expected(tokenizer, corpus), separators=(",", ":")))
    for name, metaspace in [("sentencepiece", False), ("metaspace", True)]:
        tokenizer = sentencepiece(corpus, metaspace)
        compact = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, separators=(",", ":"))
        (HERE / f"{name}.json").write_text(compact)
        (HERE / f"{name}.expected.json").write_text(json.dumps(expected(tokenizer, corpus), separators=(",", ":")))
    if len(sys.argv) > 1:
        (HERE / "demo.expected.json").write_text(json.dumps(demo(sys.argv[1], corpus), separators=(",", ":")))


if __name__ == "__main__":
    main()
