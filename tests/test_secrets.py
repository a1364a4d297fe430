"""What looks secret in a command line is masked before it is written to run.json or a page."""

from __future__ import annotations

import shlex

import pytest

from paro_advise.core.secrets import masked_command

SECRET = "s3cr3tV4lue"


@pytest.mark.parametrize(
    "command",
    [
        f"train.py --hf-token {SECRET}",
        f"train.py --hf_token={SECRET}",
        f"train.py --wandb-api-key {SECRET} --lr 1e-3",
        f"WANDB_API_KEY={SECRET} python train.py",
        f"train.py --password '{SECRET}'",
        f"train.py --db.password={SECRET}",
        f"train.py --data https://user:{SECRET}@host/data.tar",
        f"train.py --data=s3://{SECRET}:{SECRET}@bucket/path",
        f"train.py 'https://host/data?access_token={SECRET}&x=1'",
        f"train.py --aws-secret-access-key {SECRET}",
        f"train.py --key {SECRET}",
        f"train.py --credential={SECRET}",
        f"train.py --auth-header {SECRET}",
        f"train.py -token {SECRET}",
        f"bash -c 'export WANDB_API_KEY={SECRET} && python train.py'",
        f"bash -c 'python train.py --api-key={SECRET}'",
        f"bash -c 'python train.py --wandb_key {SECRET} --lr 1'",
        f"srun --export=ALL,WANDB_API_KEY={SECRET} train.py",
        f"""train.py '{{"wandb_api_key": "{SECRET}"}}'""",
        f"curl -H 'Authorization: Bearer {SECRET}'",
        f"curl -H 'Authorization: token {SECRET}'",
        f"""bash -c 'curl -H "Authorization: ApiKey id {SECRET}" https://host'""",
        f"""bash -c 'curl -u me:{SECRET} https://host'""",
        f"""train.py '{{"password": "two {SECRET}"}}'""",
        f"""bash -c 'train.py --password "it is {SECRET}, isn\\"t it"'""",
        f"""train.py --note "DB_PASSWORD='say \\"{SECRET}\\" now'" """,
        f"bash -c 'curl -sSu me:{SECRET} https://host'",
        f"train.py --data postgres://me:half@{SECRET}@host/table",
        f"train.py --db-pass {SECRET}",
        f"DB_PASS={SECRET} train.py --pat {SECRET}",
        f"train.py 'AccountName=me;AccountKey={SECRET};'",
        f"train.py --data postgres://me:half/{SECRET}@host/table",
        f"train.py --data 's3://bucket/key?X-Amz-Signature={SECRET}'",
        f"train.py --data 'abfs://container/x?sv=1&sig={SECRET}'",
        f"train.py --notify https://hooks.slack.com/services/T0/B0/{SECRET}",
    ],
)
def test_a_secret_never_stands_in_a_command_line(command):
    masked = masked_command(shlex.split(command))
    assert SECRET not in masked
    assert "***" in masked


@pytest.mark.parametrize(
    "token",
    [
        "hf_abc", "hf_AbCdEf0123456789", "ghp_0123456789abcdefABCD", "sk-proj-0123456789", "glpat-0123456789abcdef",
        "nvapi-0123456789abcdef", "AIzaSyA0123456789abcdefghij", "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl",
        "npm_0123456789abcdef", "pypi-AgEIcHlwaS5vcmc", "dckr_pat_0123456789", "ASIA0123456789ABCDEF",
    ],
)  # fmt: skip
def test_tokens_are_known_by_their_makers_prefixes(token):
    assert token not in masked_command(["train.py", token])
    assert token not in masked_command(["train.py", "--extra", f"value:{token}"])


@pytest.mark.parametrize(
    "command",
    [
        "train.py --tokens-per-step 4096 --max-tokens 12",
        "train.py --tokenizer gpt2 --tokenizer=gpt2",
        "train.py --keypoints 17 --monkey banana --keyboard us",
        "train.py --data https://host/data.tar --lr=1e-3",
        "train.py --secretary --author name",
        "train.py --passes 3 --pattern x --compass n --signal 2 --bypass yes --path a/b",
        "train.py --two-pass true --bwd-pass 2 --num-pass=3 --sig 0.5",
        "docker run docker://registry:5000/image@sha256:abc",
        "bash -c 'python train.py --tokens 5 && python key_words.py'",
        "train.py --hf_tokenizer gpt2 --note 'the key is in the door' --map a:b",
        "train.py hf_eval.log --data hf_train.jsonl.gz",
    ],
)
def test_what_is_not_secret_stays(command):
    if "secretary" in command:
        # Masked rather than leaked: the name holds the word "secret".
        assert masked_command(shlex.split(command)).endswith("--author name")
        return
    assert shlex.split(masked_command(shlex.split(command))) == shlex.split(command)


def test_only_the_value_is_masked():
    masked = masked_command(["train.py", "--hf-token", SECRET, "--lr", "0.1"])
    assert shlex.split(masked) == ["train.py", "--hf-token", "***", "--lr", "0.1"]


def test_a_flag_after_the_name_is_no_value():
    assert shlex.split(masked_command(["t.py", "--use-token", "--lr", "0.1"])) == ["t.py", "--use-token", "--lr", "0.1"]
