/** Send feedback from a web page with a token that your server has created (POST /v1/feedback/tokens). */

export type FeedbackKind = "binary" | "score" | "rating" | "categorical" | "comment" | "correction";

export interface FeedbackOptions {
  /** Where to send it: the token's `url`. */
  url: string;
  token: string;
  /** Default: "binary". */
  kind?: FeedbackKind;
  /** What the kind takes: true or false, a number, or a text. */
  value: boolean | number | string;
  /** The scale of a rating. Default: [1, 5]. */
  scale?: [number, number];
  name?: string;
  comment?: string;
  metadata?: Record<string, string>;
  /** Makes repeated calls count once. Default: a random id, made before the first try. */
  id?: string;
}

/** Feedback as it is stored. */
export interface FeedbackRecord {
  id: string;
  completion_id: string;
  choice_index: number;
  kind: FeedbackKind;
  value: number | null;
  trainable: boolean | null;
  exclusion_reason: string | null;
  /** Only if `id` was sent before: false where the feedback was withdrawn, or later feedback replaced it. */
  effective?: boolean;
  /** Only if `id` was sent before: whether the feedback was withdrawn since. */
  withdrawn?: boolean;
  [field: string]: unknown;
}

/** The server refused the feedback, or could not be reached (`status` 0). */
export class FeedbackError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly code: string | null,
    readonly requestId: string | null,
  ) {
    super(message);
    this.name = "FeedbackError";
  }
}

const MAX_RETRIES = 3;
const TIMEOUT_MS = 10_000;
const MAX_WAIT_MS = 30_000;

/** Send feedback; resolves when it is committed. Failed connections, 429 and 5xx are tried again. */
export async function sendFeedback(options: FeedbackOptions): Promise<FeedbackRecord> {
  const { url, token, kind = "binary", id = randomId(), value, scale, name, comment, metadata } = options;
  const { completion_id, choice_index } = readClaims(token);
  const body = JSON.stringify({ id, kind, completion_id, choice_index, value, scale, name, comment, metadata });
  for (let retries = 0; ; retries++) {
    let error: FeedbackError;
    let waitMs = 500 * 2 ** retries * (0.5 + Math.random() / 2);
    try {
      const response = await fetch(url, {
        method: "POST",
        headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
        body,
        keepalive: true, // a vote is sent although its reader leaves the page
        credentials: "omit",
        signal: AbortSignal.timeout(TIMEOUT_MS),
      });
      if (response.ok) return await response.json();
      error = await readError(response);
      waitMs = Math.max(waitMs, 1000 * Number(response.headers.get("retry-after")) || 0);
    } catch (cause) {
      error = new FeedbackError(`Attune could not be reached: ${cause}`, 0, null, null);
    }
    const isTemporary = error.status === 0 || error.status === 429 || error.status >= 500;
    if (!isTemporary || retries === MAX_RETRIES || waitMs > MAX_WAIT_MS) throw error;
    await new Promise((resolve) => setTimeout(resolve, waitMs));
  }
}

/** Return what the token says about its reply. The signature is the server's concern. */
function readClaims(token: string): { completion_id: string; choice_index: number } {
  try {
    return JSON.parse(atob(token.split(".")[1]!.replace(/-/g, "+").replace(/_/g, "/")));
  } catch {
    throw new FeedbackError("This is not a feedback token.", 0, "invalid_token", null);
  }
}

async function readError(response: Response): Promise<FeedbackError> {
  const { error = {} } = await response.json().catch(() => ({}));
  const message = error.message ?? `The server answered ${response.status}.`;
  return new FeedbackError(message, response.status, error.code ?? null, response.headers.get("x-request-id"));
}

/** Return 128 random bits. `crypto.randomUUID` does not exist on pages without TLS. */
function randomId(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
