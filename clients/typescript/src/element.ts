/**
 * <attune-feedback token="…" url="…">: two buttons, thumb up and thumb down, for one reply.
 *
 * Attributes: token, url; label (of the group), label-up, label-down, text-sent and text-failed (for screen readers).
 * Slots "up" and "down" replace the icons, parts "up" and "down" style the buttons. Events, which bubble:
 * attune-feedback (detail: the stored feedback) and attune-error (detail: a FeedbackError).
 */

import { type FeedbackRecord, sendFeedback } from "./feedback.js";

export * from "./feedback.js";

const CSS = `
:host { display: inline-flex; gap: 0.25em }
button { font: inherit; color: inherit; min-width: 2em; min-height: 2em; cursor: pointer;
  background: none; border: 1px solid transparent; border-radius: 0.5em; opacity: 0.65 }
button:hover, button:focus-visible, [aria-pressed="true"] { opacity: 1 }
[aria-pressed="true"] { border-color: currentColor }
:focus-visible { outline: 2px solid currentColor; outline-offset: 2px }
[role] { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap }
`;

// Where there is no DOM, as on a server that renders pages, the module can be imported all the same.
const Base = (globalThis.HTMLElement ?? class {}) as typeof HTMLElement;

export class AttuneFeedback extends Base {
  static observedAttributes = ["token", "label", "label-up", "label-down"];

  #buttons: HTMLButtonElement[] = [];
  #status?: HTMLElement;
  #value: boolean | null = null;
  #sent: Promise<unknown> = Promise.resolve();

  /** The vote that the buttons show: true, false, or null. */
  get value(): boolean | null {
    return this.#value;
  }

  connectedCallback(): void {
    if (!this.#status) this.#render();
  }

  attributeChangedCallback(name: string): void {
    if (name === "token") this.#show(null); // another reply
    this.#label();
  }

  #render(): void {
    const root = this.attachShadow({ mode: "open" });
    const sheet = new CSSStyleSheet(); // allowed by a content security policy without 'unsafe-inline'
    sheet.replaceSync(CSS);
    root.adoptedStyleSheets = [sheet];
    for (const value of [true, false]) {
      const button = document.createElement("button");
      const slot = document.createElement("slot");
      button.type = "button";
      button.part = slot.name = value ? "up" : "down";
      slot.textContent = value ? "👍" : "👎";
      button.append(slot);
      button.onclick = () => this.#vote(value);
      this.#buttons.push(button);
    }
    this.#status = document.createElement("span");
    this.#status.role = "status";
    root.append(...this.#buttons, this.#status);
    if (!this.hasAttribute("role")) this.setAttribute("role", "group");
    this.#show(this.#value);
    this.#label();
  }

  #text(attribute: string, otherwise: string): string {
    return this.getAttribute(attribute) ?? otherwise;
  }

  #label(): void {
    this.ariaLabel = this.#text("label", "Rate this reply");
    this.#buttons.forEach((button, index) => {
      button.ariaLabel = index ? this.#text("label-down", "Bad reply") : this.#text("label-up", "Good reply");
    });
  }

  #show(value: boolean | null): void {
    this.#value = value;
    this.#buttons.forEach((button, index) => (button.ariaPressed = String(value === !index)));
  }

  /** Show the vote at once and send it after the votes before it; a vote that fails is taken back. */
  #vote(value: boolean): void {
    if (value === this.#value) return;
    const before = this.#value;
    const token = this.#text("token", "");
    this.#show(value);
    this.#sent = this.#sent.then(async () => {
      try {
        const record = await sendFeedback({ url: this.#text("url", "/v1/feedback"), token, value });
        this.#end<FeedbackRecord>("attune-feedback", record, this.#text("text-sent", "Thank you for the feedback."));
      } catch (error) {
        if (this.#value === value && token === this.#text("token", "")) this.#show(before);
        this.#end("attune-error", error, this.#text("text-failed", "The feedback was not sent. Please try again."));
      }
    });
  }

  #end<T>(name: string, detail: T, text: string): void {
    this.#status!.textContent = text;
    this.dispatchEvent(new CustomEvent(name, { detail, bubbles: true, composed: true }));
  }
}

if (globalThis.customElements && !customElements.get("attune-feedback")) {
  customElements.define("attune-feedback", AttuneFeedback);
}

declare global {
  interface HTMLElementTagNameMap {
    "attune-feedback": AttuneFeedback;
  }
}
