// How is the server asked? With the operator's token, which lives in this tab's memory and nowhere else.

let token: string | null = null;

export class ApiFault extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

export function setToken(given: string | null): void {
  token = given;
}

export function hasToken(): boolean {
  return token !== null;
}

export function authorization(): Record<string, string> {
  return token === null ? {} : { authorization: `Bearer ${token}` };
}

/** The message of an answer that says no. */
export async function fault(answer: Response): Promise<ApiFault> {
  let message = `${answer.status} ${answer.statusText}`;
  try {
    const body: unknown = await answer.json();
    if (typeof body === "object" && body !== null && "message" in body) message = String(body.message);
  } catch {
    // The status says enough.
  }
  return new ApiFault(answer.status, message);
}

async function ask(method: string, path: string, body?: unknown): Promise<unknown> {
  const headers: Record<string, string> = { ...authorization(), accept: "application/json" };
  if (body !== undefined) headers["content-type"] = "application/json";
  const init: RequestInit = { method, headers, cache: "no-store" };
  if (body !== undefined) init.body = JSON.stringify(body);
  const answer = await fetch(path, init);
  if (!answer.ok) throw await fault(answer);
  return answer.json();
}

export async function get<T>(path: string): Promise<T> {
  return (await ask("GET", path)) as T;
}

export async function post<T>(path: string, body: unknown): Promise<T> {
  return (await ask("POST", path, body)) as T;
}

export async function remove<T>(path: string): Promise<T> {
  return (await ask("DELETE", path)) as T;
}

export function message(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
