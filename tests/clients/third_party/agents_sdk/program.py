"""The Agents SDK over chat completions, which loses the completion's id."""

from agent_capabilities import report_agent
from agents import OpenAIChatCompletionsModel
from client_program import API_KEY, BASE_URL, MODEL
from openai import AsyncOpenAI

client = AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY)
report_agent(OpenAIChatCompletionsModel(model=MODEL, openai_client=client), keeps_id=False)
