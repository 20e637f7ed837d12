"""The Agents SDK over the Responses API, its default."""

from agent_capabilities import report_agent
from agents import OpenAIResponsesModel
from client_program import API_KEY, BASE_URL, MODEL
from openai import AsyncOpenAI

client = AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY)
report_agent(OpenAIResponsesModel(model=MODEL, openai_client=client), keeps_id=True)
