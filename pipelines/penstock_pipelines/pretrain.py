"""The pretrain pipeline: stage, train, sync, evaluate, gate, register; its status recorded whatever happens.

fingerprint -> stage_data -> train -> sync_checkpoint -> evaluate -> gate -> register_model (if the floors hold)
"""

from collections.abc import Mapping
from typing import Any

from kfp import dsl

from penstock_components.container import LOCATION, PROJECT
from penstock_components.evaluate import evaluate
from penstock_components.fingerprint import fingerprint
from penstock_components.gate import gate
from penstock_components.record_status import record_status
from penstock_components.register_model import register_model
from penstock_components.stage_data import stage_data
from penstock_components.sync_checkpoint import sync_checkpoint
from penstock_components.train import TRAIN_DIRECTORY, train
from penstock_pipelines.images import Images
from penstock_pipelines.recipe import Recipe
from penstock_trainer.contract.config import JobConfig, compile_time_json, parse_args

TRAINER_FIELDS = {
    "steps": "steps",
    "learning_rate": "optim.learning_rate",
    "seed": "seed",
    "resume_from": "checkpoint.resume_from",
}
"""Run time parameters that are fields of the trainer's config."""


def trainer_config(recipe: Recipe, parameters: Mapping[str, Any]) -> JobConfig:
    """The config that a run with these parameters trains with. Raises ContractError: here, not after staging."""
    flags = {TRAINER_FIELDS[name]: value for name, value in parameters.items() if name in TRAINER_FIELDS}
    compile_time = compile_time_json(recipe.config, runtime=list(flags))
    return parse_args([f"--config={compile_time}", *(f"--{field}={value}" for field, value in flags.items())])


def build_pipeline(images: Images, recipe: Recipe, *, location: str) -> Any:
    """The pipeline of one recipe, ready to compile.

    Images, machines, pools, engine, model shape and global batch are constants of it; the function's arguments are
    its run time parameters.
    """
    fingerprint_op, stage_op = fingerprint(images.components), stage_data(images.components)
    sync_op, evaluate_op = sync_checkpoint(images.components), evaluate(images.trainer)
    gate_op, register_op = gate(images.components), register_model(images.components)
    record_op = record_status(images.components)
    config = recipe.config

    @dsl.pipeline(name=f"pretrain-{recipe.name}", description=recipe.description)  # type: ignore[untyped-decorator]  # kfp has no types
    def pretrain(
        source_uri: str,
        model_id: str = recipe.name,
        tokenizer_uri: str = "",
        steps: int = config.steps,
        learning_rate: float = config.optim.learning_rate,
        seed: int = config.seed,
        resume_from: str = config.checkpoint.resume_from,
        min_improvement_over_unigram: float = recipe.min_improvement_over_unigram,
        min_improvement_over_champion: float = 0.0,
        sync_to: str = "",
        service_account: str = "",
    ) -> None:
        """Train a decoder on the text at `source_uri` and register it if it passes the gate.

        Args:
            source_uri: Raw text: gs:// URI of an object, of a prefix that ends in a slash, or a pattern with *.
            model_id: Model in the registry that gets a new version.
            tokenizer_uri: gs:// URI of a tokenizer.json. Empty: train one on the data.
            steps: Optimizer steps of the whole run.
            learning_rate: Peak learning rate.
            seed: Decides initial weights and the order of the data.
            resume_from: Checkpoint root of an earlier run to continue from. Empty: start anew.
            min_improvement_over_unigram: Share by which bits per byte must be below the unigram baseline's.
            min_improvement_over_champion: Share by which bits per byte must be below the champion's, and more.
            sync_to: gs:// directory in another bucket or region that gets a copy of the export and the last checkpoint, below
                the run's name. Empty: none.
            service_account: Account that training runs as. Empty: the service's default.
        """
        # Given here although they are the components' defaults: that placeholders in constants of a pipeline are
        # resolved inside an ExecutorInput is documented; for those in defaults there is no source.
        place = {"project": PROJECT, "location": LOCATION}
        exit_task = record_op(
            pipeline_root=dsl.PIPELINE_ROOT_PLACEHOLDER, run_name=dsl.PIPELINE_JOB_NAME_PLACEHOLDER
        ).set_caching_options(False)
        with dsl.ExitHandler(exit_task, name="pretrain"):
            source = fingerprint_op(source_uri=source_uri).set_caching_options(False)
            staged = stage_op(
                source_uri=source_uri,
                fingerprint=source.outputs["fingerprint"],
                vocab_size=recipe.vocab_size,
                tokenizer_uri=tokenizer_uri,
                eval_fraction=recipe.eval_fraction,
                required_tokens=recipe.required_tokens,
            )
            trained = train(
                config,
                runtime={
                    "data.uri": staged.outputs["uri"],
                    TRAINER_FIELDS["steps"]: steps,
                    TRAINER_FIELDS["learning_rate"]: learning_rate,
                    TRAINER_FIELDS["seed"]: seed,
                    TRAINER_FIELDS["resume_from"]: resume_from,
                },
                resources=recipe.resources,
                image=images.trainer,
                location=location,
                display_name=f"train-{recipe.name}",
                service_account=service_account,
            ).set_display_name("train")
            synced = sync_op(
                gcp_resources=trained.outputs["gcp_resources"],
                train_directory=TRAIN_DIRECTORY,
                destination=sync_to,
                run_name=dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
            ).set_caching_options(False)
            scored = evaluate_op(
                model=synced.outputs["model"], dataset_uri=staged.outputs["uri"], model_id=model_id, **place
            ).set_caching_options(False)
            verdict = gate_op(
                evaluation=scored.outputs["evaluation"],
                min_improvement_over_unigram=min_improvement_over_unigram,
                min_improvement_over_champion=min_improvement_over_champion,
            ).set_caching_options(False)
            with dsl.If(verdict.outputs["register"] == True, name="passes-the-floors"):  # noqa: E712  # a kfp expression
                register_op(
                    model=synced.outputs["model"],
                    verdict=verdict.outputs["verdict"],
                    model_id=model_id,
                    serving_image=images.serving,
                    run_name=dsl.PIPELINE_JOB_NAME_PLACEHOLDER,
                    **place,
                ).set_caching_options(False)

    return pretrain
