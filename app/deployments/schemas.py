"""Request and response bodies of the deployments, canary, shadow, rollback and pins APIs."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from alignment.release.canary import CanaryConfig
from alignment.release.shadow import ShadowConfig
from app.core.http import RowView, StrictModel
from app.models import ConversationRouting, PinKind
from app.policies.context import Reason

VersionNumber = Annotated[int, Field(ge=0, le=999_999_999)]
MAX_CONVERSATION_ID = 255  # characters; the length of the turns' column


class DeployRequest(Reason):
    version: VersionNumber
    share: float | None = Field(
        None, gt=0, lt=1, description="share of the conversations, which makes the version a canary; null: all of them"
    )
    watch: bool = Field(True, description="whether the canary is promoted or aborted automatically, by its statistics")


class DeliveryRequest(StrictModel):
    """How versions of this policy are released from now on."""

    conversations: ConversationRouting = Field(
        ConversationRouting.FOLLOW,
        description="follow the version that serves, or stay on the version of the previous turn",
    )
    canary: CanaryConfig | None = Field(
        None, description="each new version first serves a share; null: the deployment's setting"
    )
    shadow: ShadowConfig | None = Field(
        None, description="each new version first runs in shadow; null: the deployment's setting"
    )


class RollbackRequest(StrictModel):
    version: VersionNumber | None = Field(
        None,
        description="number of the version to return to; if null a canary is aborted, else the parent version serves",
    )
    from_version: VersionNumber | None = Field(
        None,
        description="number of the version to roll back. Idempotent; 409 if another version serves now. "
        "Exclusive with `version`",
    )
    reason: str | None = Field(None, max_length=2000)

    @model_validator(mode="after")
    def _check_exclusive(self) -> Self:
        if self.version is not None and self.from_version is not None:
            raise ValueError("give either `version`, to return to, or `from_version`, to roll back")
        return self


class RollbackResult(BaseModel):
    object: Literal["rollback"] = "rollback"
    policy: str
    rolled_back: str = Field(description='the version that was rolled back, such as "assistant@v12"')
    serving: str


class ArmView(BaseModel):
    """One side of the comparison, since the canary or the shadow deployment began."""

    version: str
    turns: int = Field(
        description="end users that it answered, each once; conversations where requests name no end user"
    )
    failed: int = Field(description="how many of them had a reply that failed")
    rated: int = Field(
        description="people who voted, each once, by the sum of their votes; of a shadow deployment its judged pairs"
    )
    good: int
    approval: float | None = Field(description="good of rated")
    approval_low: float | None = Field(description="Wilson's 95 % interval of the approval")
    approval_high: float | None
    mean_length: float | None = Field(description="tokens")
    seconds_per_token: float | None


class ComparisonView(BaseModel):
    """How a new version compares with the one that serves."""

    version: str
    share: float
    since: float
    candidate: ArmView
    stable: ArmView
    verdict: str
    reason: str
    figures: dict[str, object]


class CanaryView(ComparisonView):
    object: Literal["canary"] = "canary"
    until: float = Field(description="when the statistics decide at the latest, if the canary is watched")
    watched: bool
    verdict: str = Field(description="by the statistics so far: wait, promote or roll_back")


class ShadowView(ComparisonView):
    object: Literal["shadow"] = "shadow"
    share: float = Field(description="share of the served replies that the candidate answers too")
    better: int = Field(description="pairs, one per end user, in which the candidate's reply was judged better")
    tied: int
    worse: int
    disabled_reason: str | None = Field(description="why the version cannot pass; null if it can")
    verdict: str = Field(description="by the statistics so far: wait, promote, reject or lapse (too few judged pairs)")


class DeploymentView(RowView):
    object: Literal["deployment"] = "deployment"
    policy: str
    serving: str
    previous: str | None
    canary: CanaryView | None
    shadow: ShadowView | None
    epoch: int = Field(description="how often the deployment has changed")
    changed_at: float | None
    conversations: ConversationRouting
    canary_overridden: bool = Field(description="whether the policy overrides the deployment's canary setting")
    canary_config: CanaryConfig | None = Field(description="null: new versions go live at once")
    shadow_overridden: bool = Field(description="whether the policy overrides the deployment's shadow setting")
    shadow_config: ShadowConfig | None = Field(description="null: new versions do not run in shadow")


class PinRequest(StrictModel):
    kind: PinKind
    subject: str = Field(
        min_length=1,
        max_length=512,
        description="a conversation's id, an end user as requests name them, or an API key's id or visible prefix",
    )
    version: VersionNumber = Field(
        strict=True, description="number of a version that has served traffic, or of the canary"
    )
    reason: str | None = Field(None, max_length=2000, description="kept with the pin and in the audit log")

    @field_validator("subject")
    @classmethod
    def _check_length(cls, subject: str, info: ValidationInfo) -> str:
        if info.data.get("kind") == PinKind.CONVERSATION and len(subject) > MAX_CONVERSATION_ID:
            raise ValueError(f"a conversation's id has {MAX_CONVERSATION_ID} characters at most")
        return subject


class PinView(RowView):
    object: Literal["pin"] = "pin"
    id: str
    policy: str
    kind: PinKind
    subject: str = Field(description="for an API key its id")
    version: str = Field(description='such as "assistant@v12"')
    loaded: bool = Field(
        description="whether a ready engine has loaded the version; if not, the reconciler has it loaded"
    )
    reason: str | None
    created_at: float = Field(description="when it was set or last changed; `reason` and `created_by` likewise")
    created_by: str = Field(description="the prefix of the API key that set it")


class PinDeleted(BaseModel):
    object: Literal["pin.deleted"] = "pin.deleted"
    id: str
    deleted: Literal[True] = True
