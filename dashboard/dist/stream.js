// How do events arrive? One stream of server-sent events, read with the token in a header, which the browser's own
// reader of such streams cannot send. After a break it goes on from the last event it saw.
import { authorization, fault, message } from "./api.js";
const WAIT_MIN_MS = 500;
const WAIT_MAX_MS = 10_000;
/** Without any event for so long the stream is taken for dead. */
const SILENCE_MS = 10_000;
export class Stream {
    listener;
    last = null;
    wait = WAIT_MIN_MS;
    running = null;
    timer = 0;
    constructor(listener) {
        this.listener = listener;
    }
    /** Opens the stream, in place of the one that is open. */
    open() {
        window.clearTimeout(this.timer);
        this.running?.abort();
        const running = new AbortController();
        this.running = running;
        void this.run(running);
    }
    async run(running) {
        let about = "the stream ended";
        try {
            const headers = { ...authorization(), accept: "text/event-stream" };
            if (this.last !== null)
                headers["last-event-id"] = this.last;
            const answer = await fetch("/dashboard/stream", { headers, cache: "no-store", signal: running.signal });
            if (answer.status === 401) {
                const refused = await fault(answer);
                this.listener.link("locked", refused.message);
                return;
            }
            if (!answer.ok || answer.body === null)
                throw await fault(answer);
            this.wait = WAIT_MIN_MS;
            await this.read(answer.body, running);
        }
        catch (error) {
            about = message(error);
        }
        if (this.running !== running)
            return;
        this.listener.link("connecting", about);
        this.timer = window.setTimeout(() => this.open(), this.wait);
        this.wait = Math.min(WAIT_MAX_MS, this.wait * 2);
    }
    async read(body, running) {
        const reader = body.getReader();
        const decoder = new TextDecoder();
        let unread = "";
        for (;;) {
            const silence = window.setTimeout(() => running.abort(new Error("no event for 10 s")), SILENCE_MS);
            const part = await reader.read();
            window.clearTimeout(silence);
            if (part.done)
                return;
            unread += decoder.decode(part.value, { stream: true });
            let end = unread.indexOf("\n\n");
            while (end >= 0) {
                this.event(unread.slice(0, end));
                unread = unread.slice(end + 2);
                end = unread.indexOf("\n\n");
            }
        }
    }
    event(text) {
        let name = "";
        let data = "";
        for (const line of text.split("\n")) {
            if (line.startsWith("event: "))
                name = line.slice(7);
            else if (line.startsWith("id: "))
                this.last = line.slice(4);
            else if (line.startsWith("data: "))
                data += line.slice(6);
        }
        if (name === "hello")
            this.listener.hello(JSON.parse(data));
        else if (name === "tick")
            this.listener.tick(JSON.parse(data));
        else
            return;
        this.listener.link("live", "");
    }
}
